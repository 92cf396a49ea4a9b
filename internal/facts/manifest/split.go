package manifest

import "bytes"

// chunk is the text of one YAML document.
type chunk struct {
	text []byte
	line int // lines of the file before it
}

// split cuts a YAML stream into documents, so that an error in one does not affect the
// others. Only "---" and "..." at the start of a line separate documents (YAML 1.2,
// section 9.2). Chunks without content are omitted.
func split(data []byte) []chunk {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	var chunks []chunk
	start, line := 0, 0
	cut := func(end, next, nextLine int) {
		if text := data[start:end]; !blank(text) {
			chunks = append(chunks, chunk{text, line})
		}
		start, line = next, nextLine
	}
	at := 0
	for n := 0; at < len(data); n++ {
		end := at + bytes.IndexByte(data[at:], '\n') + 1
		if end == at {
			end = len(data)
		}
		if marker(data[at:end], "---") {
			cut(at, at+3, n) // "--- {a: b}" has content behind it
		} else if marker(data[at:end], "...") {
			cut(at, end, n+1)
		}
		at = end
	}
	cut(len(data), len(data), 0)
	return chunks
}

func marker(line []byte, m string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(m))
	return ok && (len(rest) == 0 || bytes.IndexByte([]byte(" \t\r\n"), rest[0]) >= 0)
}

// blank reports whether text consists of white space, comments and directives (which
// precede "---").
func blank(text []byte) bool {
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && line[0] != '%' {
			return false
		}
	}
	return true
}
