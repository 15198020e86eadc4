"""Rows of measurements, printed as they come and written to a CSV file at the end."""

import csv
from datetime import date

import jax


class Table:
    """Collects rows. Each says where and when it was measured."""

    def __init__(self):
        self.rows = []

    def add(self, **columns):
        """Adds a row and prints it."""
        where = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "date": date.today().isoformat()}
        self.rows.append(columns | where)
        print(*(f"{key}={value}" for key, value in self.rows[-1].items()), flush=True)

    def write(self, path):
        """Writes all rows, unless path is None."""
        if path is None:
            return
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, self.rows[0])
            writer.writeheader()
            writer.writerows(self.rows)
