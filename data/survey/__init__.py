"""What the volumes of a source are like: names, patients, outliers, and a grid that suits them."""
