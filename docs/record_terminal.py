"""Makes docs/terminal.svg, the README's picture, from a real run: python docs/record_terminal.py"""

import pathlib
import tempfile

from jaxtrain import config, train
from jaxtrain.reporting import terminal

HERE = pathlib.Path(__file__).resolve().parent

if __name__ == "__main__":
    picture = HERE / "terminal.svg"
    with tempfile.TemporaryDirectory() as folder, terminal.record(str(picture), width=110, until=0.8):
        train.run(config.load(str(HERE.parent / "configs" / "digits.py")), pathlib.Path(folder) / "digits")
    picture.write_text(picture.read_text().replace(folder, "/home/you/runs"))
