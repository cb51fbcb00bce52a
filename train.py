"""The entry point: `python train.py --help`. recipes/ define what a run does, conf/ its settings."""

if __name__ == "__main__":  # a process that a run spawns imports this file and must start nothing
    from olmo_rl.cli import main

    main()
