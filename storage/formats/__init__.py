"""What the bytes mean: index, manifest, records, and the formats of torch and safetensors. No torch here."""
