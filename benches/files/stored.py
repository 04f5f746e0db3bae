"""Files of public repositories that lie in a folder, by a table of their names and contents."""

import argparse
import csv
import hashlib
import pathlib

HERE = pathlib.Path(__file__).parent


def parser(document):
    """The arguments that each of these programs has: the folder of the files, and the highwater that reads them."""
    made = argparse.ArgumentParser(description=document.splitlines()[0])
    made.add_argument("folder", type=pathlib.Path)
    made.add_argument("--highwater", default=HERE.parents[1] / "target/release/highwater")
    return made


def files(table, folder):
    """Each row of a table in this folder whose file is there, with a name for people and its path. Prints which are not there, or
    are not the ones that were looked at."""
    for row in csv.DictReader((HERE / table).open(), delimiter="\t", quoting=csv.QUOTE_NONE):
        path = folder / row["repository"].replace("/", "+") / row.get("stored", row["file"])
        name = f"{row['repository']} {row['file']}"
        if not path.exists():
            print(f"{name:66} not there")
        elif hashlib.sha256(path.read_bytes()).hexdigest()[:16] != row["sha256"]:
            print(f"{name:66} has other contents than the file that was looked at")
        else:
            yield row, name, path
