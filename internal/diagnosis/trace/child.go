package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// ChildVariable is the environment variable that makes `spillway trace` the process that
// opens the connection. Sockets belong to the network namespace and the cgroup of the
// process that opens them, so the connection needs a process of its own.
const ChildVariable = "SPILLWAY_TRACE_CONNECTION"

// childRequest is the value of ChildVariable.
type childRequest struct {
	Protocol   model.Protocol `json:"protocol"`
	Src        netip.Addr     `json:"src,omitzero"`
	SourcePort uint16         `json:"sourcePort,omitempty"`
	Dst        netip.AddrPort `json:"dst"`
	TimeoutMS  int64          `json:"timeoutMs,omitempty"`
	Dry        bool           `json:"dry,omitempty"` // only call connect()
}

// childEvent is a line of the child's output: one after connect(), and one at the end.
type childEvent struct {
	// Remote is the address to which the kernel connects, after socket hooks, if the
	// kernel still lists the socket.
	Remote   netip.AddrPort `json:"remote,omitzero"`
	Errno    int            `json:"errno,omitempty"`
	Answered bool           `json:"answered,omitempty"`
	Micros   int64          `json:"micros,omitempty"`
	Text     string         `json:"text,omitempty"` // an error before connect()
}

// child is the running process.
type child struct {
	cmd *exec.Cmd
	out *bufio.Reader
}

// request is that of the traced connection, from this port.
func (t *tracer) request(port uint16) childRequest {
	r := childRequest{Protocol: t.Protocol, Dst: t.to(), SourcePort: port, TimeoutMS: t.Timeout.Milliseconds()}
	if !t.From.Addr.IsLoopback() {
		r.Src = t.From.Addr
	}
	return r
}

// insideClient runs f in the client's network namespace, or the instance's where that is not known.
func (t *tracer) insideClient(f func() error) error {
	if t.client.ns != nil {
		return t.client.ns.Enter(f)
	}
	return t.inside(f)
}

// start starts the child in the client's network namespace and in a cgroup.
func (t *tracer) start(cgroup string, r childRequest) (*child, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	c := &child{cmd: exec.Command(program, "trace")}
	c.cmd.Env = append(os.Environ(), ChildVariable+"="+string(text))
	c.cmd.SysProcAttr = &syscall.SysProcAttr{}
	if cgroup != "" {
		dir, err := os.Open(cgroup)
		if err != nil {
			return nil, fmt.Errorf("start probe: %w", err)
		}
		defer dir.Close()
		c.cmd.SysProcAttr.UseCgroupFD, c.cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	c.out = bufio.NewReader(out)
	if err := t.insideClient(c.cmd.Start); err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	return c, nil
}

// next reads an event of the child.
func (c *child) next() (e childEvent, err error) {
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		return e, fmt.Errorf("read result of probe: %w", err)
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return e, fmt.Errorf("read result of probe: %w", err)
	}
	if e.Text != "" {
		return e, errors.New(e.Text)
	}
	return e, nil
}

// end ends the process.
func (c *child) end() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// Child is the process of ChildVariable: it opens one connection, or sends one datagram.
func Child(request string, out io.Writer) error {
	var r childRequest
	if err := json.Unmarshal([]byte(request), &r); err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	tell := func(e childEvent) { _ = json.NewEncoder(out).Encode(e) }
	fd, err := r.socket()
	if err != nil {
		tell(childEvent{Text: err.Error()})
		return nil
	}
	defer unix.Close(fd)
	began := time.Now()
	err = unix.Connect(fd, sockaddr(r.Dst))
	pending := errors.Is(err, unix.EINPROGRESS)
	e := childEvent{Errno: number(err)}
	if pending {
		e.Errno = 0
	}
	e.Remote, _ = r.remote(fd)
	tell(e)
	if r.Dry || e.Errno != 0 {
		return nil
	}
	e.Answered, e.Errno = r.wait(fd, pending)
	e.Micros = time.Since(began).Microseconds()
	tell(e)
	return nil
}

// socket opens and binds a socket that does not block.
func (r *childRequest) socket() (int, error) {
	domain, typ := unix.AF_INET, unix.SOCK_STREAM
	if r.Dst.Addr().Is6() {
		domain = unix.AF_INET6
	}
	if r.Protocol == model.UDP {
		typ = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(domain, typ|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if r.Src.IsValid() {
		if err := unix.Bind(fd, sockaddr(netip.AddrPortFrom(r.Src, r.SourcePort))); err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("bind to %s: %w", netip.AddrPortFrom(r.Src, r.SourcePort), err)
		}
	}
	return fd, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// number is the errno of an error, 0 for none.
func number(err error) int {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return int(errno)
	}
	return 0
}

// wait waits for the answer: the handshake, or a datagram.
func (r *childRequest) wait(fd int, pending bool) (answered bool, errno int) {
	events := int16(unix.POLLOUT)
	if r.Protocol == model.UDP {
		if _, err := unix.Write(fd, []byte("spillway trace\n")); err != nil {
			return false, number(err)
		}
		events = unix.POLLIN
	} else if !pending {
		return true, 0
	}
	deadline := time.Now().Add(time.Duration(r.TimeoutMS) * time.Millisecond)
	for left := time.Until(deadline); left > 0; left = time.Until(deadline) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
		n, err := unix.Poll(fds, int(left.Milliseconds())+1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false, number(err)
		}
		if n == 1 {
			errno, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			return errno == 0, errno
		}
	}
	return false, int(unix.ETIMEDOUT)
}

// remote reads from the kernel's list of sockets to which address the socket connects:
// getpeername shows the Service.
func (r *childRequest) remote(fd int) (netip.AddrPort, bool) {
	local, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, false
	}
	name, port := "tcp", 0
	if r.Protocol == model.UDP {
		name = "udp"
	}
	switch a := local.(type) {
	case *unix.SockaddrInet4:
		port = a.Port
	case *unix.SockaddrInet6:
		name, port = name+"6", a.Port
	}
	text, err := os.ReadFile("/proc/self/net/" + name)
	if err != nil {
		return netip.AddrPort{}, false
	}
	return remoteOf(text, port)
}

// remoteOf finds the other end of the socket with a local port in a table of /proc/net.
func remoteOf(table []byte, port int) (netip.AddrPort, bool) {
	for line := range bytes.Lines(table) {
		f := strings.Fields(string(line))
		if len(f) < 4 || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) || strings.HasSuffix(f[2], ":0000") {
			continue
		}
		if remote, ok := kernel.ProcAddr(f[2]); ok {
			return remote, true
		}
	}
	return netip.AddrPort{}, false
}

// errnoText names an error of connect().
func errnoText(errno unix.Errno) string {
	if errno == 0 {
		return "allowed"
	}
	return fmt.Sprintf("%s (%s)", unix.ErrnoName(errno), errno)
}
