"""A user's list of videos -> checked Arrow rows. Manifests and indexes are read; no video is decoded here."""
