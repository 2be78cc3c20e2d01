"""Headers of others, fetched and never edited."""
