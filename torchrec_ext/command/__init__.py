"""What the subcommands of ``torchrec-ext`` share: ranks, configuration files and errors."""
