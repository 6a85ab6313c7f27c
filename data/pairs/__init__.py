"""What volumes are paired with: finds the partner of each volume, checks it, and reads it on the volume's grid."""
