"""What the service does by itself: rules that make jobs of events, and what is due by the clock."""
