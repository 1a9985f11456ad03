"""Plans of saves and loads, first ones and again."""
