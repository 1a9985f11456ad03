"""safetensors files, and the folders of them that Hugging Face's libraries write.

Which of a folder's files belong together is found by `dcp.storage.formats.opening.weights_folder`.
"""
