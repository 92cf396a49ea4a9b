package load

import (
	"strings"
	"testing"
)

func TestResponse(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	tests := []struct {
		name, in string
		done     bool
		err      error
		status   int
		closes   bool
	}{
		{"with a body", ok + "Content-Length: 3\r\n\r\nabc", true, nil, 200, false},
		{"upper-case field", ok + "CONTENT-LENGTH:3\r\n\r\nabc", true, nil, 200, false},
		{"empty body", ok + "Content-Length: 0\r\n\r\n", true, nil, 200, false},
		{"body not whole", ok + "Content-Length: 3\r\n\r\nab", false, nil, 200, false},
		{"header not whole", ok + "Content-Length: 3\r\n", false, nil, 0, false},
		{"no content", "HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n", true, nil, 204, false},
		{"not modified ignores its length", "HTTP/1.1 304 x\r\nContent-Length: 9\r\n\r\n", true, nil, 304, false},
		{"no reason", "HTTP/1.1 503\r\nContent-Length: 0\r\n\r\n", true, nil, 503, false},
		{"close", ok + "Connection: Close\r\nContent-Length: 0\r\n\r\n", true, nil, 200, true},
		{"HTTP/1.0 closes", "HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", true, nil, 200, true},
		{"HTTP/1.0 kept", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", true, nil, 200, false},
		{"body until the end", ok + "\r\nabc", false, nil, 200, false},
		{"too much body", ok + "Content-Length: 3\r\n\r\nabcd", false, errBadResponse, 200, false},
		{"chunked", ok + "Transfer-Encoding: chunked\r\n\r\n", false, errChunked, 200, false},
		{"length is no number", ok + "Content-Length: 0x3\r\n\r\n", false, errBadResponse, 200, false},
		{"length overflows", ok + "Content-Length: 99999999999999999999\r\n\r\n", false, errBadResponse, 200, false},
		{"not HTTP", "220 vsFTPd ready.\r\n\r\n", false, errBadResponse, 0, false},
		{"an interim response", "HTTP/1.1 100 Continue\r\n\r\n", false, errBadResponse, 0, false},
		{"field without a colon", ok + "nonsense\r\n\r\n", false, errBadResponse, 200, false},
		{"endless header", ok + strings.Repeat("x: y\r\n", 5000), false, errBadResponse, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			// Whole, then byte by byte: the result must be the same.
			for _, size := range []int{len(tt.in), 1, 7} {
				var r response
				r.reset()
				var done bool
				var err error
				for i := 0; i < len(tt.in) && err == nil; i += size {
					done, err = r.feed([]byte(tt.in[i:min(i+size, len(tt.in))]))
				}
				if done != tt.done || err != tt.err {
					t.Fatalf("in pieces of %d: done %v, error %v; want %v, %v", size, done, err, tt.done, tt.err)
				}
				if err == nil && (r.status != tt.status || r.closes != tt.closes) {
					t.Errorf("status %d, closes %v; want %d, %v", r.status, r.closes, tt.status, tt.closes)
				}
			}
		})
	}
}

func TestResponseUntilEOF(t *testing.T) {
	var r response
	r.feed([]byte("HTTP/1.1 200 OK\r\n\r\nabc"))
	if !r.eof() {
		t.Error("the end of the connection was not taken for the end of the body")
	}
	r.reset()
	r.feed([]byte("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc"))
	if r.eof() {
		t.Error("a body that was cut off was taken for complete")
	}
}

func FuzzResponse(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"), 5)
	f.Add([]byte("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"), 1)
	f.Fuzz(func(t *testing.T, in []byte, cut int) {
		var whole, pieces response
		cut = max(0, min(cut, len(in)))
		d1, e1 := whole.feed(in)
		d2, e2 := pieces.feed(in[:cut])
		if !d2 && e2 == nil {
			d2, e2 = pieces.feed(in[cut:])
			if d1 != d2 || e1 != e2 {
				t.Errorf("whole: %v %v, cut at %d: %v %v", d1, e1, cut, d2, e2)
			}
		}
	})
}
