"""Every word of the world: names, question forms, caption forms and note forms.

Text of the world is lower case and space separated; punctuation stands alone. The set is closed:
`vocabulary()` lists each word that a question, an answer, a caption or a passage can hold.
"""

from __future__ import annotations

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 24, 32),
    "orange": (255, 140, 0),
    "yellow": (240, 222, 20),
    "green": (16, 150, 60),
    "blue": (28, 70, 225),
    "purple": (112, 24, 150),
    "pink": (255, 130, 200),
    "black": (16, 16, 16),
}
SHAPES: tuple[str, ...] = (
    "circle",
    "square",
    "triangle",
    "star",
    "ring",
    "cross",
    "heart",
    "moon",
    "arrow",
    "diamond",
    "hourglass",
    "bolt",
)
SCENES: tuple[str, ...] = ("beach", "forest", "city", "desert", "snow", "ocean", "meadow", "night")
NUMBERS: tuple[str, ...] = ("one", "two", "three", "four", "five", "six", "seven", "eight")
OBJECTS: tuple[str, ...] = (
    "lamp",
    "chair",
    "table",
    "clock",
    "cup",
    "door",
    "window",
    "carpet",
    "sofa",
    "vase",
    "mirror",
    "kettle",
)

QUESTIONS: dict[str, str] = {
    "needle": "what colour was the {0} ?",
    "order": "which came first , the {0} or the {1} ?",
    "count": "how many cards were shown ?",
    "scene": "which scene came just before the {0} ?",
    "combine": "what colours were the {0} and the {1} ?",
    "after": "which card came right after the {0} ?",
}
NOTE_QUESTION = "what colour is the {0} in the notes ?"

OPENING = "the video opens on the {0} ."
CHANGE = "then the scene changes to the {0} ."
# The shape comes first: its colour is then asked of the picture as a question asks it.
APPEAR = "then {0} {1} appears in {2} ."
ENDING = "the end ."

NOTE = "the note says the {0} is {1} ."

# Prose that carries no fact, by its number of words. Each length from 4 to 9 is present, so that a passage
# can be filled to the word. Some sentences name a colour, yet never of a household object.
PROSE: dict[int, tuple[str, ...]] = {
    4: ("the rain stops .", "{0} speaks softly .", "nobody asks why ."),
    5: ("{0} walks home slowly .", "the {1} is {2} .", "a train passes by ."),
    6: ("{0} looks at the {1} .", "the {1} is very old .", "it is a quiet morning ."),
    7: ("{0} paints the {1} {2} today .", "the wind moves the {2} {1} .", "{0} waits for an old friend ."),
    8: (
        "{0} sells the {2} {1} to {3} .",
        "in the evening {0} writes to {3} .",
        "the {1} stands near a river again .",
    ),
    9: (
        "{0} and {3} talk about the {2} {1} .",
        "later {0} forgets the {1} and walks home .",
        "the {1} by the river was {2} once .",
    ),
}
PEOPLE: tuple[str, ...] = ("anna", "ben", "clara", "david", "emma", "felix")
THINGS: tuple[str, ...] = ("boat", "coat", "fence", "gate", "hat", "wagon", "tower", "bridge")


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def vocabulary() -> tuple[str, ...]:
    """Each word and mark that the world can write, sorted, without repeats."""
    forms = [*QUESTIONS.values(), NOTE_QUESTION, OPENING, CHANGE, APPEAR, ENDING, NOTE]
    forms += [form for group in PROSE.values() for form in group]
    words = {word for form in forms for word in form.split() if "{" not in word}
    names = (*COLOURS, *SHAPES, *SCENES, *NUMBERS, *OBJECTS, *PEOPLE, *THINGS, "a", "an")
    return tuple(sorted(words.union(names)))
