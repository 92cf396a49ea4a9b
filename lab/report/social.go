package report

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	imagedraw "image/draw"
	"image/png"
	"strings"

	"golang.org/x/image/font"
	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/opentype"
	"golang.org/x/image/math/fixed"

	"spillway.dev/spillway/lab/experiment"
)

// The picture that a link to the report shows. Services that show it accept PNG and no
// SVG, and this is the size that they recommend.
const (
	socialFile   = "card.png"
	socialWidth  = 1200
	socialHeight = 630
	socialMargin = 64
)

var (
	socialPage = color.RGBA{0xff, 0xff, 0xff, 0xff}
	socialText = color.RGBA{0x1c, 0x21, 0x27, 0xff}
	socialSoft = color.RGBA{0x56, 0x60, 0x6b, 0xff}
	socialBlue = color.RGBA{0x1f, 0x6f, 0xb2, 0xff}
)

// socialCard returns the title and the verdicts of a run as a PNG.
func socialCard(run *experiment.Run) ([]byte, error) {
	faces := map[string]font.Face{}
	for name, f := range map[string]struct {
		ttf  []byte
		size float64
	}{"title": {gobold.TTF, 46}, "name": {gobold.TTF, 26}, "verdict": {goregular.TTF, 26}, "small": {goregular.TTF, 22}} {
		parsed, err := opentype.Parse(f.ttf)
		if err != nil {
			return nil, fmt.Errorf("draw card: %w", err)
		}
		if faces[name], err = opentype.NewFace(parsed, &opentype.FaceOptions{Size: f.size, DPI: 72, Hinting: font.HintingFull}); err != nil {
			return nil, fmt.Errorf("draw card: %w", err)
		}
	}
	img := image.NewRGBA(image.Rect(0, 0, socialWidth, socialHeight))
	imagedraw.Draw(img, img.Bounds(), image.NewUniform(socialPage), image.Point{}, imagedraw.Src)
	imagedraw.Draw(img, image.Rect(0, 0, 16, socialHeight), image.NewUniform(socialBlue), image.Point{}, imagedraw.Src)
	text := func(x, y int, face string, c color.Color, s string) {
		d := font.Drawer{Dst: img, Src: image.NewUniform(c), Face: faces[face], Dot: fixed.P(x, y)}
		d.DrawString(clip(faces[face], s, socialWidth-socialMargin-x))
	}
	y := 96
	for _, line := range fold(faces["title"], title(run), socialWidth-2*socialMargin) {
		text(socialMargin, y, "title", socialText, line)
		y += 58
	}
	y = max(y+12, 300)
	for _, res := range run.Results {
		if res.Card == nil || y > socialHeight-90 {
			continue
		}
		text(socialMargin, y, "name", socialBlue, res.Name)
		text(socialMargin+220, y, "verdict", socialText, res.Card.Verdict)
		y += 44
	}
	text(socialMargin, socialHeight-36, "small", socialSoft, strings.TrimPrefix(project, "https://")+" · "+run.Machine.String())
	var b bytes.Buffer
	if err := png.Encode(&b, img); err != nil {
		return nil, fmt.Errorf("draw card: %w", err)
	}
	return b.Bytes(), nil
}

// fold breaks a text at blanks into lines of a width.
func fold(face font.Face, s string, most int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(s) {
		next := strings.TrimSpace(line + " " + word)
		if line != "" && font.MeasureString(face, next).Ceil() > most {
			lines, next = append(lines, line), word
		}
		line = next
	}
	return append(lines, line)
}

// clip cuts a text to a width.
func clip(face font.Face, s string, most int) string {
	r := []rune(s)
	for n := len(r); n > 0; n-- {
		short := string(r[:n])
		if n < len(r) {
			short += "…"
		}
		if font.MeasureString(face, short).Ceil() <= most {
			return short
		}
	}
	return ""
}
