"""What codecs of token vectors cost, in bytes and seconds, and what they do to answers."""
