"""Makes docs/terminal.svg, the README's picture, from a real run: python docs/record_terminal.py"""

import pathlib
import tempfile

from jaxtrain import config, terminal, train

HERE = pathlib.Path(__file__).resolve().parent

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, terminal.record(str(HERE / "terminal.svg"), width=110, until=0.8):
        train.run(config.load(str(HERE.parent / "configs" / "digits.py")), pathlib.Path(folder) / "digits")
