#!/bin/sh
# Makes the files of this folder with programs other than the libraries that decode them in mmd_workers; see README.md.
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
exec </dev/null

# ---- images ----
quarter() { echo -f lavfi -i color=$1:s=32x24; }
ffmpeg='ffmpeg -y -v error -nostdin'
$ffmpeg $(quarter red) $(quarter lime) $(quarter blue) $(quarter white) -filter_complex '[0][1]hstack[a];[2][3]hstack[b];[a][b]vstack' -frames:v 1 "$work/corners.png"
convert rose: -strip "$work/rose.png"
avifenc --min 10 --max 20 -s 8 "$work/corners.png" corners.avif
avifenc --min 10 --max 20 -s 8 --irot 3 "$work/corners.png" turned.avif
avifenc --min 20 --max 30 -s 8 -d 10 -y 444 "$work/rose.png" ten-bit.avif
heif-enc -q 80 -o corners.heic "$work/corners.png"
heif-enc -q 60 -b 10 -o ten-bit.heic "$work/rose.png"

convert -size 64x48 gradient:black-white -depth 16 -define png:bit-depth=16 -define png:color-type=0 -strip grey16.png
convert -size 48x32 gradient:red-blue -depth 16 -define png:bit-depth=16 -define png:color-type=2 -strip colour16.png
convert "$work/corners.png" -transparent lime -strip PNG8:palette.png
convert "$work/rose.png" -resize 35x23! -interlace PNG -strip interlaced.png
convert "$work/corners.png" -strip turned.png
exiftool -q -overwrite_original '-Orientation#=6' turned.png
convert "$work/corners.png" -strip xmp.png
exiftool -q -overwrite_original '-XMP-tiff:Orientation#=8' xmp.png
convert "$work/corners.png" -quality 90 -strip turned.jpg
exiftool -q -overwrite_original '-Orientation#=5' turned.jpg
convert "$work/rose.png" -colorspace CMYK -quality 85 -strip cmyk.jpg
convert "$work/rose.png" -interlace JPEG -quality 85 -strip progressive.jpg
convert "$work/rose.png" -colorspace Gray -quality 85 -strip grey.jpg
cwebp -quiet -q 70 "$work/rose.png" -o lossy.webp
convert "$work/corners.png" -transparent lime -strip "$work/transparent.png"
cwebp -quiet -lossless -exact "$work/transparent.png" -o lossless.webp
convert "$work/corners.png" -negate "$work/negative.png"
img2webp -loop 0 -lossless "$work/corners.png" -lossless "$work/negative.png" -o animated.webp > /dev/null
convert -delay 10 "$work/corners.png" "$work/negative.png" -strip -layers Optimize animated.gif
$ffmpeg -f lavfi -i testsrc=s=32x24:r=5:d=0.8 -bitexact -f apng animated.png
convert "$work/rose.png" -resize 20x13! BMP3:plain.bmp
convert "$work/corners.png" -colors 4 -type Palette -compress RLE BMP3:runs.bmp

convert "$work/rose.png" -resize 20x13! -strip -compress None "$work/plain.tiff"
for compression in none lzw zip zstd packbits lzma; do tiffcp -c $compression "$work/plain.tiff" $compression.tiff; done
tiffcp -8 -L -c lzw "$work/plain.tiff" big.tiff
tiffcp -t -w 16 -l 16 -c zip "$work/plain.tiff" tiles.tiff
tiffcp -p separate -c lzw "$work/plain.tiff" planes.tiff
convert "$work/rose.png" -strip -compress JPEG -quality 85 jpeg.tiff
convert "$work/corners.png" -strip -monochrome -compress Group4 fax.tiff
convert "$work/corners.png" "$work/negative.png" -strip -compress LZW pages.tiff
convert "$work/corners.png" -strip -orient RightTop -compress LZW turned.tiff
convert -size 32x24 gradient:black-white -strip -depth 16 -compress LZW -endian MSB grey16.tiff
convert "$work/rose.png" -resize 20x13! -strip -colorspace CMYK -compress LZW cmyk.tiff
convert "$work/corners.png" -transparent lime -strip -compress LZW transparent.tiff

# ---- video ----
test='-f lavfi -i testsrc=s=64x48:r=10:d=2 -pix_fmt yuv420p -bitexact'
short='-f lavfi -i testsrc=s=64x48:r=10:d=1.2 -pix_fmt yuv420p -bitexact'
$ffmpeg $test -c:v libaom-av1 -cpu-used 8 -crf 50 animated.avif
$ffmpeg $test -c:v libx265 -preset veryfast -x265-params log-level=none:keyint=5:bframes=2 -tag:v hvc1 hevc.mp4
$ffmpeg $test -c:v libx265 -preset veryfast -x265-params log-level=none:open-gop=1:keyint=8 hevc.mkv
$ffmpeg $test -c:v libaom-av1 -cpu-used 8 -g 8 -crf 40 av1.mp4
$ffmpeg $test -c:v libaom-av1 -cpu-used 8 -lag-in-frames 12 -g 20 -crf 40 av1.webm
x264='-c:v libx264 -preset fast -crf 30 -x264-params log-level=none:keyint=6'
$ffmpeg $short $x264 h264.mp4
for container in mov mkv avi ts; do $ffmpeg -i h264.mp4 -c copy -bitexact h264.$container; done
$ffmpeg $short -c:v libxvid -bf 2 -q:v 8 packed.avi
$ffmpeg $short -c:v mpeg4 -q:v 8 -bf 2 mpeg4.mp4
$ffmpeg $short -c:v libvpx -crf 40 -b:v 50k -auto-alt-ref 1 -lag-in-frames 8 vp8.webm
$ffmpeg $short -c:v libvpx-vp9 -crf 45 -b:v 0 -auto-alt-ref 1 -lag-in-frames 12 vp9.webm
smooth='-f lavfi -i gradients=s=64x48:r=10:d=1.2:c0=red:c1=lime:c2=blue:n=3:seed=1:speed=0.1 -pix_fmt yuv420p10le -bitexact'
$ffmpeg $smooth -c:v libvpx-vp9 -profile:v 2 -crf 45 -b:v 0 ten-bit.webm
$ffmpeg $smooth $x264 ten-bit.mp4
$ffmpeg $smooth -c:v libx265 -preset veryfast -x265-params log-level=none ten-bit.mkv
$ffmpeg $short -pix_fmt yuvj420p $x264 -color_range pc full-range.mp4
$ffmpeg $short -vf scale=out_color_matrix=bt709 $x264 -colorspace bt709 -color_primaries bt709 -color_trc bt709 bt709.mp4
$ffmpeg $short -pix_fmt yuv444p $x264 full-colour.mp4
$ffmpeg $short -vf "setpts='if(lt(N,6),N,6+(N-6)*4)/10/TB'" -vsync vfr $x264 variable.mp4
$ffmpeg -i variable.mp4 -c copy -bitexact variable.mkv
$ffmpeg -i h264.mp4 -c copy -bitexact -metadata:s:v rotate=90 turned.mp4
$ffmpeg -f lavfi -i testsrc=s=64x64:r=20:d=1.2 -vf interlace -pix_fmt yuv420p -bitexact $x264 -flags +ildct+ilme -top 1 interlaced.mp4
$ffmpeg -f lavfi -i testsrc=s=64x64:r=50:d=0.48 -vf interlace -pix_fmt yuv420p -bitexact -c:v mpeg2video -flags +ildct+ilme -q:v 12 interlaced.ts
# copied and cut without encoding
$ffmpeg $test -vf noise=alls=30:allf=t -c:v libxvid -bf 2 -g 5 -q:v 14 "$work/packed.avi"
$ffmpeg -fflags +genpts -i "$work/packed.avi" -c copy -bitexact packed.mkv
$ffmpeg -i "$work/packed.avi" -c copy -bitexact -bsf:v mpeg4_unpack_bframes unpacked.mp4
$ffmpeg -i h264.avi -c copy -bitexact copied.mp4
$ffmpeg -fflags +genpts -i h264.avi -c copy -bitexact copied.mkv
$ffmpeg $test -s 128x96 -c:v h263p -g 8 -q:v 12 h263p.mkv
$ffmpeg -ss 1.2 -i hevc.mkv -c copy -bitexact open.mkv
for codec in mpeg2video mpeg4; do $ffmpeg $test -c:v $codec -bf 2 -g 6 -q:v 16 -sc_threshold 1000000000 -bitexact "$work/$codec.mkv"; done
for container in mkv ts; do $ffmpeg -ss 1.25 -i "$work/mpeg2video.mkv" -c copy -bitexact open-mpeg2.$container; done
$ffmpeg -ss 1.25 -i "$work/mpeg4.mkv" -c copy -bitexact open-mpeg4.mkv
$ffmpeg -ss 0.35 -i h264.mp4 -c copy -bitexact edited.mp4
$ffmpeg -ss 0.7 -i hevc.mkv -c copy -bitexact -copyinkf "$work/cut.mkv"
tail -c +$((188 * 17 + 1)) h264.ts > joined-late.ts

scene() { echo -f lavfi -t 2 -i "$1,scale=64:48,setsar=1,format=yuv420p,noise=alls=8:allf=t"; }
scenes='[0][1][2][3]concat=n=4'
$ffmpeg $(scene smptebars=r=10) $(scene rgbtestsrc=r=10) $(scene color=gray:r=10) $(scene yuvtestsrc=r=10) -filter_complex $scenes -bitexact -c:v libx264 -preset fast -crf 30 -x264-params log-level=none:keyint=25:scenecut=0 scenes.mp4
$ffmpeg -i scenes.mp4 -vf "setpts='if(lt(N,40),N,40+(N-40)*4)/10/TB'" -vsync vfr -bitexact -c:v libvpx-vp9 -crf 45 -b:v 0 -g 30 scenes-variable.webm
$ffmpeg -i scenes.mp4 -bitexact -c:v mpeg4 -q:v 8 -g 250 -sc_threshold 1000000000 scenes.avi

# ---- sound ----
espeak-ng -w "$work/speech.wav" 'one two'
speech() { sox -R "$work/speech.wav" "$@" trim 0.15 "${seconds:-0.25}"; }
seconds=0.2 speech -r 8000 -b 8 -e unsigned telephone8.wav
seconds=0.2 speech -r 8000 -e a-law a-law.wav
seconds=0.2 speech -r 8000 -e mu-law mu-law.wav
seconds=0.1 speech -r 16000 -b 16 sixteen.wav
seconds=0.1 speech -r 16000 -b 16 -t wav - | cat > piped.wav
seconds=0.05 speech -r 44100 -b 24 twenty-four.wav
seconds=0.05 speech -r 11025 -b 32 thirty-two.wav
seconds=0.02 speech -r 96000 -b 32 -e float float.wav
seconds=0.05 speech -r 22050 -b 64 -e float double.wav
seconds=0.3 speech -r 8000 -e gsm-full-rate gsm.wav
seconds=0.3 speech -r 11025 -e ima-adpcm adpcm.wav
speech -r 44100 -b 16 "$work/44.wav"
speech -r 48000 -b 16 "$work/48.wav"
speech -r 11025 -b 16 "$work/11.wav"
seconds=0.5 speech -r 16000 -b 16 "$work/16.wav"
seconds=0.5 speech -r 8000 -b 16 "$work/8.wav"
seconds=0.05 speech -r 96000 -b 24 "$work/96.wav"
lame --quiet -b 64 "$work/44.wav" constant.mp3
lame --quiet -V 6 "$work/11.wav" variable.mp3
lame --quiet -t -b 32 --cbr "$work/11.wav" no-header.mp3
flac --silent -f "$work/96.wav" -o ninety-six.flac
opusenc --quiet --bitrate 24 "$work/44.wav" speech.opus
oggenc -Q -q 1 "$work/44.wav" -o vorbis.ogg
$ffmpeg -i vorbis.ogg -c copy -bitexact vorbis.mkv
seconds=0.3 speech -r 16000 -b 16 "$work/short.wav"
oggenc -Q -q 0 "$work/short.wav" -o short.ogg  # on one page
$ffmpeg -i "$work/short.wav" -c:a libvorbis -bitexact vorbis.mka
$ffmpeg -i "$work/44.wav" -c:a aac -b:a 48k -bitexact speech.aac
$ffmpeg -i "$work/44.wav" -c:a aac -b:a 48k -bitexact speech.m4a
$ffmpeg -i "$work/11.wav" -c:a aac -b:a 24k -bitexact eleven.m4a
$ffmpeg -i "$work/44.wav" -c:a alac -bitexact lossless.m4a
sox "$work/8.wav" -t amr-nb narrow.amr
$ffmpeg -i narrow.amr -c copy -bitexact narrow.3gp
"${PYTHON:-python3}" - "$work/16.wav" wide.amr << 'END'  # no program of Debian encodes it, a library does
import ctypes, sys, wave
encoder = ctypes.CDLL("libvo-amrwbenc.so.0")
encoder.E_IF_init.restype = ctypes.c_void_p
state, frame = ctypes.c_void_p(encoder.E_IF_init()), ctypes.create_string_buffer(100)
with wave.open(sys.argv[1]) as sound, open(sys.argv[2], "wb") as out:
    out.write(b"#!AMR-WB\n")
    while len(samples := sound.readframes(320)) == 640:
        size = encoder.E_IF_encode(state, 2, samples, frame, 0)
        out.write(frame.raw[:size])
END
tones=''
for hertz in 300 500 700 900 1100 1300; do tones="$tones -f lavfi -i sine=f=$hertz:r=16000:d=0.1"; done
surround="$tones -filter_complex amerge=inputs=6,aformat=channel_layouts=5.1 -bitexact"
$ffmpeg $surround -c:a pcm_s16le surround.wav
$ffmpeg $surround -c:a flac surround.flac
$ffmpeg $surround -c:a aac -b:a 96k surround.m4a
$ffmpeg $surround -c:a ac3 -ar 48000 -b:a 192k -f mpegts surround.ts
clip='-f lavfi -i testsrc=s=32x24:r=5:d=0.4'
$ffmpeg $clip -i "$work/44.wav" $x264 -pix_fmt yuv420p -c:a aac -b:a 32k -bitexact sound.mp4
$ffmpeg $clip -i "$work/48.wav" -c:v libvpx -b:v 30k -c:a libopus -b:a 24k -bitexact sound.webm
$ffmpeg $clip -i "$work/44.wav" -c:v mpeg4 -q:v 10 -c:a libmp3lame -b:a 32k -bitexact sound.avi
$ffmpeg $clip -i "$work/44.wav" -c:v mpeg2video -q:v 10 -c:a mp2 -b:a 64k -bitexact sound.ts

# ---- other containers ----
$ffmpeg -i mu-law.wav -c copy -bitexact mu-law.au
$ffmpeg -i sixteen.wav -c:a pcm_s16be -bitexact sixteen.caf
$ffmpeg -i lossless.m4a -c copy -bitexact lossless.caf
$ffmpeg -i sixteen.wav -c copy -bitexact sixteen.w64
$ffmpeg -i lossless.m4a -c:a adpcm_ima_qt -bitexact ima4.caf
$ffmpeg -i lossless.m4a -c:a adpcm_ms -bitexact ms-adpcm.wav
$ffmpeg -i sixteen.wav -c copy -rf64 always -bitexact "$work/rf64.wav"
{ printf BW64; tail -c +5 "$work/rf64.wav"; } > bw64.wav
$ffmpeg -i h264.mp4 -c copy -bitexact h264.flv
$ffmpeg $clip -i lossless.m4a -pix_fmt yuv420p -c:v flv1 -q:v 8 -c:a libmp3lame -b:a 32k -bitexact sorenson.flv
$ffmpeg -i lossless.m4a $test -c:v mpeg2video -r 25 -bf 2 -g 6 -q:v 16 -c:a mp2 -b:a 64k -bitexact -f vob program.mpg
$ffmpeg -i interlaced.mp4 -i lossless.m4a -c:v copy -c:a ac3 -ar 48000 -b:a 96k -bitexact -f mpegts -mpegts_m2ts_mode 1 avchd.mts
$ffmpeg $short -pix_fmt yuvj420p -c:v mjpeg -q:v 12 -bitexact mjpeg.avi
$ffmpeg $short -pix_fmt yuvj422p -c:v mjpeg -q:v 12 -bitexact mjpeg.mov
$ffmpeg $short -pix_fmt yuv422p10le -c:v prores_ks -profile:v 0 -bitexact prores.mov
$ffmpeg $short -s 128x96 -c:v h263 -g 5 -q:v 16 -bitexact "$work/h263.3gp"
$ffmpeg -i "$work/h263.3gp" -i narrow.amr -c copy -bitexact h263.3gp

"${PYTHON:-python3}" expected.py
