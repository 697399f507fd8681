"""Where blocks are stored below the node's shared memory: SSD, Redis, S3."""
