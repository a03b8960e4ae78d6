"""A user's list of videos -> Arrow rows, each checked; nothing is opened here but the list itself."""
