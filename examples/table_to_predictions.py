"""Your own table: from a csv to predictions of new rows."""

# %% A table with text, numbers and gaps; in its place goes a csv or parquet file of yours.
import csv
import random
from pathlib import Path

import runner

draw = random.Random(0)
rows = []
for _ in range(600):
    size, city = draw.randint(30, 200), draw.choice(["Bern", "Genf", "Chur"])
    price = size * {"Bern": 9, "Genf": 12, "Chur": 6}[city] + draw.gauss(0, 20)
    rows.append({"size": "" if draw.random() < 0.05 else size, "city": city, "price": round(price)})

table = Path("outputs/houses.csv")
table.parent.mkdir(exist_ok=True)
with table.open("w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=rows[0])
    writer.writeheader()
    writer.writerows(rows)

# %% Train. What a column is, gaps and scaling are recognised, and kept in the checkpoint.
config = runner.compose(
    ["data=tabular", f"data.path={table}", "data.target=price", "training.epochs=40"]
)
folder = Path("outputs/houses")
with runner.build(config, folder) as run:
    summary = runner.train(run)
print({name: round(value, 3) for name, value in summary.metrics.items()})

# %% Predict new rows: prepared exactly as those of the training were.
new = [{"size": 100, "city": "Genf"}, {"size": 100, "city": "Chur"}, {"size": None, "city": "Bern"}]
overrides = ["data=tabular", f"data.path={table}", "data.target=price"]
with runner.load(folder, overrides=overrides) as model:
    predicted = model.predict(new)
for row, price in zip(new, predicted["prediction"], strict=True):
    print(row, round(float(price)))
