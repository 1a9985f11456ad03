"""The catalog's database: tables, migrations, and the one way to read and write them."""
