"""What delivers events to other services: who is told, where it may go, how it is signed, how often."""
