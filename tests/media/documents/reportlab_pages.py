"""Makes pages.pdf with ReportLab: three pages with text, a filled rectangle and a line each, the last one turned."""

import sys

from reportlab.lib.colors import blue, green, red
from reportlab.pdfgen import canvas

document = canvas.Canvas(sys.argv[1], pagesize=(288, 216), invariant=1)
for number, colour in enumerate((red, green, blue), 1):
    document.setFillColor(colour)
    document.rect(20, 20, 120, 90, stroke=0, fill=1)
    document.setFillColorRGB(0, 0, 0)
    document.setFont("Helvetica", 28)
    document.drawString(30, 160, f"Page {number}")
    document.line(150, 30, 270, 190)
    if number == 3:
        document.setPageRotation(90)
    document.showPage()
document.save()
