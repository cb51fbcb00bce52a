"""Values of the configuration, one choice a file; the wheel ships them as the package `olmo_rl.conf`."""
