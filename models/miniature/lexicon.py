"""What the miniature's pages and text turns are made of: words, templates, lists, known texts."""

from __future__ import annotations

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Laura Max Nora Oscar Paul Rosa".split()
)
VERBS = "sees likes buys finds wants has paints sells opens takes brings keeps".split()
ADJECTIVES = "red blue green old new small big white black young quiet warm".split()
NOUNS = (
    "apple house river garden window bridge market train table book letter coffee bread bird "
    "horse flower picture door lamp boat clock chair forest mountain street paper orange fox "
    "cat dog"
).split()
PLACES = (
    "in the garden,at the market,near the river,on the table,by the window,under the bridge,"
    "in the house,at the station,on the boat,in the forest"
).split(",")
TIMES = "today,tomorrow,on Monday,on Friday,in May,in winter,at noon,every day".split(",")
# Unit prices in half euros: an item line follows from its quantity and its name.
ITEMS = {
    "coffee": 7, "tea": 4, "bread": 5, "apple": 1, "orange": 2, "milk": 3, "cake": 6, "soup": 9,
    "juice": 5, "butter": 4, "cheese": 8, "rice": 3, "salad": 10, "pizza": 15, "water": 2,
    "sugar": 3,
}  # fmt: skip
MONTHS = (
    "January February March April May June July August September October November December"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LISTS = {
    "days": DAYS,
    "months": MONTHS,
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "colors": "red orange yellow green blue indigo violet".split(),
    "seasons": "spring summer autumn winter".split(),
    "numbers": "one two three four five six seven eight nine ten eleven twelve".split(),
}
KNOWN = {
    "fox": "The quick brown fox jumps over the lazy dog.",
    "pangram": "Pack my box with five dozen liquor jugs.",
    "alice": "Alice was beginning to get very tired of sitting by her sister on the bank.",
    "moby": "Call me Ishmael. Some years ago, never mind how long precisely.",
    "cities": "It was the best of times, it was the worst of times.",
    "hamlet": "To be, or not to be, that is the question.",
    "star": "Twinkle, twinkle, little star, how I wonder what you are.",
    "lamb": "Mary had a little lamb, its fleece was white as snow.",
    "humpty": "Humpty Dumpty sat on a wall, Humpty Dumpty had a great fall.",
    "road": "Two roads diverged in a yellow wood, and sorry I could not travel both.",
    "rights": "All human beings are born free and equal in dignity and rights.",
    "sphinx": "Sphinx of black quartz, judge my vow.",
}
QUESTIONS = {
    "read": "Read the text.",
    "json": "Read as JSON.",
    "pages": "Read each page.",
    "total": "What is the total?",
    "number": "What is the invoice number?",
}
