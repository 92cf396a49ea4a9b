// Package escape quotes text from the system, such as names and comments that any user may
// choose, so that neither a shell nor a terminal interprets it.
package escape

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Shell returns s as one word of a POSIX shell: unchanged if it is safe, else in single
// quotes.
func Shell(s string) string {
	if s == "!" {
		return s // as iptables negates
	}
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return !plain(r) }) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// plain are characters that mean nothing to a shell.
func plain(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_@%+=:,./-", r)
}

// ShellWords splits a command line where a shell does, and leaves the quotes that
// Shell wrote in the words.
func ShellWords(line string) []string {
	quoted, escaped := false, false
	return strings.FieldsFunc(line, func(r rune) bool {
		switch {
		case escaped:
			escaped = false
		case r == '\'':
			quoted = !quoted
		case r == '\\' && !quoted:
			escaped = true
		case !quoted:
			return r == ' ' || r == '\t' || r == '\n'
		}
		return false
	})
}

// Text is s with every character that a terminal would not just show - control
// characters, line breaks, bytes that are no UTF-8 - in Go's notation.
func Text(s string) string {
	if Shown(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		if shown(r, size) {
			b.WriteString(s[:size])
		} else {
			q := strconv.QuoteToGraphic(s[:size])
			b.WriteString(q[1 : len(q)-1])
		}
		s = s[size:]
	}
	return b.String()
}

// Shown reports whether a terminal just shows s.
func Shown(s string) bool {
	for i, r := range s {
		size := utf8.RuneLen(r)
		if r == utf8.RuneError {
			_, size = utf8.DecodeRuneInString(s[i:])
		}
		if !shown(r, size) {
			return false
		}
	}
	return true
}

func shown(r rune, size int) bool {
	return unicode.IsGraphic(r) && (r != utf8.RuneError || size > 1)
}
