"""Names of others: of the 2.8 package, of other libraries' arguments. Not public."""
