"""DDS inside other people's training loops: Hugging Face's Trainer (`hf`) and Lightning (`lightning`).

The core never imports them. They need ``pip install 'gradsieve[hf]'`` and ``'gradsieve[lightning]'``.
"""
