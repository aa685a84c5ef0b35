"""The command `tuskline` as a program of spark-submit, which runs files of Python by their names.

spark-submit --master spark://10.0.0.5:7077 --packages ... submit.py lake run --config /etc/tuskline/tuskline.toml
"""

from walsender_bridge.cli.app import main

if __name__ == "__main__":
    main()
