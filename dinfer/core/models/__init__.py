"""Model families: what a checkpoint's config.json and tensor names mean, as data over one transformer core."""
