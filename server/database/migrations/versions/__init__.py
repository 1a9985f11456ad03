"""Each step between two revisions of the tables; a released one is never changed."""
