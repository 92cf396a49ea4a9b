package escape

import "strings"

// OneLine returns the text of an error on one line, escaped as Text does; joined
// errors have several lines.
func OneLine(err error) string {
	return Text(strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; "))
}
