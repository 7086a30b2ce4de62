"""What clients, a browser and a crowd find when they talk to `dinfer serve`."""
