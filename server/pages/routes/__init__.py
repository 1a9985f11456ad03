"""The pages, a module for each kind of thing, and what their forms do."""
