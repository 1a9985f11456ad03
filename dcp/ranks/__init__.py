"""Communication between ranks: messages, results, signs of life, and one error for several failures."""
