"""Who holds which prefix, and who should get a request; and the words both sides share."""
