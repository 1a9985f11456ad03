"""Development tools: programs that write parts of the product."""
