"""safetensors files, and the folders of them that Hugging Face's libraries write."""
