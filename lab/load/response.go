package load

import (
	"bytes"
	"errors"
)

// maxHead bounds the header of a response, as servers bound that of a request.
const maxHead = 16 << 10

var (
	errBadResponse = errors.New("bad response")
	errChunked     = errors.New("chunked response")
)

// response parses one HTTP/1.x response that arrives in parts. It extracts what a
// measuring client needs: the status, the end of the body, and whether the connection
// stays open. It refuses a chunked body; the servers under test send a Content-Length.
type response struct {
	head     []byte // a header that has not arrived whole; nearly always empty
	inBody   bool
	untilEOF bool  // no length: the body ends with the connection
	left     int64 // remaining bytes of the body
	status   int
	closes   bool // the server will close the connection
}

// reset prepares the value for the next response and keeps its memory.
func (r *response) reset() { *r = response{head: r.head[:0]} }

// feed parses the next bytes and reports whether the response is complete.
func (r *response) feed(b []byte) (done bool, err error) {
	if !r.inBody {
		if len(r.head) > 0 {
			r.head = append(r.head, b...)
			b = r.head
		}
		end := bytes.Index(b, []byte("\r\n\r\n"))
		if end < 0 {
			if len(b) > maxHead {
				return false, errBadResponse
			}
			if len(r.head) == 0 {
				r.head = append(r.head, b...)
			}
			return false, nil
		}
		if err := r.parseHead(b[:end+2]); err != nil {
			return false, err
		}
		b = b[end+4:]
		r.inBody = true
	}
	if r.untilEOF {
		return false, nil
	}
	r.left -= int64(len(b))
	if r.left < 0 {
		return false, errBadResponse // more than Content-Length, without a request
	}
	return r.left == 0, nil
}

// eof handles the end of the connection and reports whether it was a valid end of the
// response.
func (r *response) eof() bool { return r.inBody && r.untilEOF }

// parseHead reads the status line and the few header fields that matter. Each
// line of head ends in CRLF.
func (r *response) parseHead(head []byte) error {
	line, rest, _ := bytes.Cut(head, []byte("\r\n"))
	// "HTTP/1.1 200 OK"; the reason may be missing.
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.")) || line[8] != ' ' {
		return errBadResponse
	}
	status, ok := number(line[9:12])
	if !ok || status < 200 {
		return errBadResponse
	}
	r.status = int(status)
	r.closes = line[7] == '0'
	r.untilEOF = true
	for len(rest) > 0 {
		line, rest, _ = bytes.Cut(rest, []byte("\r\n"))
		if err := r.parseField(line); err != nil {
			return err
		}
	}
	if status == 204 || status == 304 {
		r.untilEOF, r.left = false, 0
	}
	return nil
}

func (r *response) parseField(line []byte) error {
	name, value, ok := bytes.Cut(line, []byte(":"))
	if !ok {
		return errBadResponse
	}
	value = bytes.TrimSpace(value)
	switch {
	case equalFold(name, "content-length"):
		n, ok := number(value)
		if !ok {
			return errBadResponse
		}
		r.left, r.untilEOF = n, false
	case equalFold(name, "transfer-encoding"):
		return errChunked
	case equalFold(name, "connection"):
		r.closes = equalFold(value, "close")
	}
	return nil
}

// equalFold compares with a lower-case ASCII word.
func equalFold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// number reads an unsigned decimal of up to 15 digits.
func number(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 15 {
		return 0, false
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}
