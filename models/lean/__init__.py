"""Building blocks of networks that move fewer bytes and keep fewer of them than stock ones, for the same results."""
