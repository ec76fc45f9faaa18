"""A report of what was built, for who reads it: on a page, on the terminal, beside another one.

The room reads plain data and knows neither graphs nor the compiler; ``csx/costs`` makes the data.

report_file   ``report.json`` and ``report.html`` in a folder: their form, written and read
words         numbers in words, and what all of them say alike
scaling       how long a step takes on more systems, from its messages and its time
page          the page: what its template (``page.html``, style sheet and all) asks of the data
console       a report on the terminal
difference    two reports side by side
"""
