"""Everything starts here: `python train.py --help`. Recipes say what a run does, conf/ what it may be."""

if __name__ == "__main__":  # a process that a run spawns imports this file and must start nothing
    from olmo_rl.cli import main

    main()
