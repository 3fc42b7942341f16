#!/bin/sh
# Makes the PDFs of this folder with other programs than the library that renders them in mmd_workers, and expected.json with what Poppler renders of
# them. It needs Debian 12's `ghostscript qpdf poppler-utils python3-reportlab python3-numpy`.
set -eu
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
exec </dev/null

"$python" reportlab_pages.py reportlab.pdf
cat > page.ps << 'END'
%!PS
<< /PageSize [216 288] >> setpagedevice
0.2 0.4 0.9 setrgbcolor 30 30 100 150 rectfill
0 setgray /Helvetica findfont 24 scalefont setfont 40 230 moveto (PostScript) show
1 0 0 setrgbcolor 3 setlinewidth 20 20 moveto 200 270 lineto stroke
showpage
END
gs -q -dNOPAUSE -dBATCH -sDEVICE=pdfwrite -sOutputFile=ghostscript.pdf page.ps
rm page.ps
qpdf --deterministic-id --object-streams=generate --linearize reportlab.pdf object-streams.pdf
qpdf --encrypt secret owner 256 -- --static-id --static-aes-iv ghostscript.pdf encrypted.pdf || true
qpdf --deterministic-id ghostscript.pdf --add-attachment make.sh -- attachment.pdf
"$python" expected.py
