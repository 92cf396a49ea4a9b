// Package page prints the text of commands: tables that fit the terminal, paragraphs, and
// colors where the reader sees them. It is the one home of both.
package page

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/charmbracelet/colorprofile"
	"github.com/charmbracelet/x/ansi"
	"github.com/charmbracelet/x/term"
)

// Page is the destination of a command's text: a terminal, a pipe or a file.
type Page struct {
	io.Writer
	// Width is the number of columns. 0: no limit, as in a pipe, whose reader wants whole
	// names.
	Width int
	// Color reports that the reader sees colors. NO_COLOR, CLICOLOR_FORCE and TERM decide.
	Color bool
	// Wide adds the columns of -o wide, and does not limit the width.
	Wide bool
}

// Of returns w itself if it is a Page, and else a Page for w. The width is the terminal's,
// or that of the environment variable COLUMNS.
func Of(w io.Writer) *Page {
	if p, ok := w.(*Page); ok {
		return p
	}
	return &Page{Writer: w, Width: Width(w), Color: colorprofile.Detect(w, os.Environ()) >= colorprofile.ANSI}
}

// Width returns the number of columns of w, 0 if they are not limited.
func Width(w io.Writer) int {
	if f, ok := w.(term.File); ok {
		if width, _, err := term.GetSize(f.Fd()); err == nil && width > 0 {
			return width
		}
	}
	n, err := strconv.Atoi(os.Getenv("COLUMNS"))
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// IsTerminal reports whether w is a terminal.
func IsTerminal(w io.Writer) bool {
	f, ok := w.(term.File)
	return ok && term.IsTerminal(f.Fd())
}

// Style is the meaning of a color.
type Style int

// The styles.
const (
	Plain Style = iota
	Good
	Warning
	Bad
	Strong // a heading
)

// Paint returns the text in the color of a style, on a page with colors.
func (p *Page) Paint(s Style, text string) string {
	if !p.Color || s == Plain || text == "" {
		return text
	}
	style := ansi.Style{}.Bold()
	switch s {
	case Good:
		style = style.ForegroundColor(ansi.Green)
	case Warning:
		style = style.ForegroundColor(ansi.Yellow)
	case Bad:
		style = style.ForegroundColor(ansi.Red)
	}
	return style.Styled(text)
}

// The width of paragraphs: at most, and on a page without a limit.
const (
	widestText = 100
	usualText  = 80
)

// Wrap breaks a text at its blanks, so that its lines fit the page after an indent. Longer
// words stay whole.
func (p *Page) Wrap(text, indent string) string {
	width := usualText
	if p.Width > 0 {
		width = min(widestText, p.Width)
	}
	return indent + strings.ReplaceAll(broken(text, width-len(indent), ansi.Wordwrap), "\n", "\n"+indent)
}

// Reflow breaks the paragraphs of a text anew. Lines that begin with a blank stay as they
// are.
func (p *Page) Reflow(text string) string {
	var out strings.Builder
	var words []string
	flush := func() {
		if len(words) > 0 {
			out.WriteString(p.Wrap(strings.Join(words, " "), "") + "\n")
		}
		words = nil
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, " \n")
		if line == "" || line[0] == ' ' {
			flush()
			out.WriteString(line + "\n")
			continue
		}
		words = append(words, strings.Fields(line)...)
	}
	flush()
	return out.String()
}

// broken breaks a text at its blanks, and not at hyphens, as both functions of package
// ansi do.
func broken(text string, width int, wrap func(string, int, string) string) string {
	const hyphen = "\u2011"
	text = wrap(strings.ReplaceAll(text, "-", hyphen), max(width, 1), "")
	lines := strings.Split(strings.ReplaceAll(text, hyphen, "-"), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}

// Counted returns a number with its noun, in the plural unless it is 1: "2 entries".
func Counted(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "x"):
		what += "e"
	case strings.HasSuffix(what, "entry"):
		what = strings.TrimSuffix(what, "y") + "ie"
	}
	return fmt.Sprintf("%d %ss", n, what)
}
