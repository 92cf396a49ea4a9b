package probe

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// askNetexec asks agnhost's netexec for its Pod's name.
func (s *socket) askNetexec(dst netip.AddrPort, deadline time.Time) (a Answer, err error) {
	if s.connected {
		a.Peer = addrText(s.peer())
	}
	if s.stream {
		a.Server, err = s.getHostname(dst, deadline)
		return a, err
	}
	s.discard() // a late answer does not say what it answers
	if err := s.send([]byte("hostname\n"), dst); err != nil {
		return a, err
	}
	name, from, err := s.line(deadline)
	a.Server, a.From = string(name), addrText(from)
	return a, err
}

// getHostname asks by HTTP, and leaves the connection open.
func (s *socket) getHostname(dst netip.AddrPort, deadline time.Time) (string, error) {
	if err := s.send([]byte("GET /hostname HTTP/1.1\r\nHost: netexec\r\n\r\n"), dst); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(&reader{s, deadline}), nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("read answer: HTTP status %s", resp.Status)
	}
	return string(body), err
}

// reader reads a stream until a deadline.
type reader struct {
	s        *socket
	deadline time.Time
}

func (r *reader) Read(p []byte) (int, error) {
	if len(r.s.pending) == 0 {
		if err := r.s.more(r.deadline); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.s.pending)
	r.s.pending = r.s.pending[n:]
	return n, nil
}

// discard deletes datagrams that have arrived.
func (s *socket) discard() {
	buf := make([]byte, 1)
	for {
		if _, _, err := unix.Recvfrom(s.fd, buf, 0); err != nil && err != unix.EINTR {
			return
		}
	}
}

// hasEnded reports whether a process has ended, or ends and has closed its sockets. The
// kernel frees the memory of a process, which has its command line, before it closes files.
func hasEnded(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return pid > 0 && (err != nil || len(text) == 0)
}
