"""What a condition is worth: samples with the right one, with another case's and with none, against the true volume."""
