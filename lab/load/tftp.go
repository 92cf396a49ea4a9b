package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

// blockSize is TFTP's without options (RFC 1350).
const blockSize = 512

// tftpRequest requests a file; the load's servers have the same file under every name.
var tftpRequest = []byte("\x00\x01file\x00octet\x00")

// download is one active transfer, with a socket and so a source port of its own.
type download struct {
	fd    int
	block uint16 // the last received one
	begun time.Time
	seen  time.Time // of the last packet
}

// tftpLoop reads files, one after another on each connection.
type tftpLoop struct {
	cfg       Config
	endpoint  endpoint
	poll      *poller
	downloads []download
	hist      *hdrhistogram.Histogram
	errors    map[string]int64
	requests  int64
	slow      [2]int64 // over 1 s, over 3 s
	slowList  []SlowRequest
	bytes     int64
	started   time.Time
	shown     time.Time // when Progress was called last
	buf       [blockSize + 4]byte
}

// runTFTP is Run for Kind TFTP: a closed loop of one thread.
func runTFTP(ctx context.Context, cfg Config) (*Result, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	defer unix.Close(p.fd)
	l := &tftpLoop{
		cfg: cfg, endpoint: newEndpoint(cfg, netip.Addr{}), poll: p, downloads: make([]download, cfg.Connections),
		hist: newHistogram(), errors: map[string]int64{},
	}
	l.endpoint.typ = unix.SOCK_DGRAM
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, started := cpuSeconds(), time.Now()
	l.started = started
	for i := range l.downloads {
		if err := l.begin(i); err != nil {
			return nil, fmt.Errorf("ask %s: %w", cfg.Target, err)
		}
	}
	defer l.close()
	if err := l.run(ctx, started); err != nil {
		return nil, err
	}
	ended := time.Now()
	wall := ended.Sub(started)
	underWay := l.abandon(ended)
	r := &Result{
		Kind: cfg.Kind, Target: cfg.Target.String(), Connections: cfg.Connections, Requests: l.requests, Bytes: l.bytes,
		Errors: l.errors, Seconds: (wall - cfg.Warmup).Seconds(), ClientCPUSeconds: cpuSeconds() - before,
		Latency: summarize(l.hist), Histogram: encode(l.hist), Over1s: l.slow[0], Over3s: l.slow[1], Slow: l.slowList,
		UnderWay: underWay, Interrupted: ctx.Err() != nil,
	}
	r.Rate = float64(r.Requests) / r.Seconds
	r.ClientLimited = r.ClientCPUSeconds >= clientBusy*wall.Seconds()
	return r, nil
}

func (l *tftpLoop) close() {
	for _, d := range l.downloads {
		unix.Close(d.fd)
	}
}

// run continues until the time is up or ctx ends.
func (l *tftpLoop) run(ctx context.Context, started time.Time) error {
	end, checked := started.Add(l.cfg.Warmup+l.cfg.Duration), started
	for {
		now := time.Now()
		if !now.Before(end) || ctx.Err() != nil {
			return nil
		}
		events, err := l.poll.wait(10 * time.Millisecond)
		if err != nil {
			return fmt.Errorf("wait for packets: %w", err)
		}
		now = time.Now()
		for i := range events {
			if err := l.receive(int(events[i].Fd), events[i].Pad, now); err != nil {
				return err
			}
		}
		if now.Sub(checked) > l.cfg.Timeout/10 {
			checked = now
			if err := l.expire(now); err != nil {
				return err
			}
		}
		l.progress(now)
	}
}

// progress calls Progress about twice a second.
func (l *tftpLoop) progress(now time.Time) {
	if l.cfg.Progress == nil || now.Sub(l.shown) < 500*time.Millisecond {
		return
	}
	l.shown = now
	p := Progress{Elapsed: now.Sub(l.started), Total: l.cfg.Warmup + l.cfg.Duration, Answered: l.requests}
	for _, n := range l.errors {
		p.Failed += n
	}
	l.cfg.Progress(p)
}

// abandon counts the transfers that are active at the end, and the ones that have
// taken more than a second by then.
func (l *tftpLoop) abandon(end time.Time) (underWay int64) {
	for i := range l.downloads {
		if d := &l.downloads[i]; l.counts(d) {
			underWay++
			l.countSlow(d, end, "under way at the end")
		}
	}
	return underWay
}

// counts reports whether a transfer began after the warm-up.
func (l *tftpLoop) counts(d *download) bool {
	return d.begun.Sub(l.started) >= l.cfg.Warmup
}

// countSlow records a transfer that ended now, if it took more than a second.
func (l *tftpLoop) countSlow(d *download, now time.Time, failure string) {
	took := now.Sub(d.begun)
	if took < time.Second {
		return
	}
	l.slow[0]++
	if took >= 3*time.Second {
		l.slow[1]++
	}
	if len(l.slowList) < maxSlow {
		l.slowList = append(l.slowList, SlowRequest{At: (d.begun.Sub(l.started) - l.cfg.Warmup).Seconds(), Seconds: took.Seconds(),
			Source: localAddr(d.fd), Error: failure})
	}
}

// begin opens a socket and sends the request.
func (l *tftpLoop) begin(slot int) error {
	fd, err := unix.Socket(l.endpoint.family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	now := time.Now()
	l.downloads[slot] = download{fd: fd, begun: now, seen: now}
	if err := l.poll.add(fd, int32(slot), int32(fd)); err != nil {
		return err
	}
	return unix.Sendto(fd, tftpRequest, 0, l.endpoint.target)
}

// again ends a transfer, successful or not, and starts the next.
func (l *tftpLoop) again(slot int, failed string) error {
	d, now := &l.downloads[slot], time.Now()
	if l.counts(d) {
		l.countSlow(d, now, failed)
	}
	if l.counts(d) && failed == "" {
		l.requests++
		_ = l.hist.RecordValue(int64(now.Sub(d.begun)))
	} else if l.counts(d) {
		l.errors[failed]++
	}
	unix.Close(d.fd)
	return l.begin(slot)
}

func (l *tftpLoop) expire(now time.Time) error {
	for i := range l.downloads {
		if now.Sub(l.downloads[i].seen) > l.cfg.Timeout {
			if err := l.again(i, "timeout"); err != nil {
				return err
			}
		}
	}
	return nil
}

// receive reads a transfer's socket, and acknowledges the packets.
func (l *tftpLoop) receive(slot int, generation int32, now time.Time) error {
	d := &l.downloads[slot]
	for int32(d.fd) == generation {
		n, err := l.read(d)
		if err == unix.EAGAIN {
			return nil
		}
		if err == errOtherAddress {
			return l.again(slot, err.Error())
		}
		if err != nil {
			return l.again(slot, "refused")
		}
		if n < 4 || l.buf[1] != 3 {
			return l.again(slot, "bad response")
		}
		d.seen = now
		block := binary.BigEndian.Uint16(l.buf[2:])
		if block != d.block+1 {
			continue // again
		}
		d.block = block
		l.bytes += int64(n - 4)
		if _, err := unix.Write(d.fd, []byte{0, 4, l.buf[2], l.buf[3]}); err != nil {
			return l.again(slot, "refused")
		}
		if n < blockSize+4 {
			return l.again(slot, "")
		}
	}
	return nil
}

// errOtherAddress reports an answer from an address to which the client sent nothing.
// Answers look like this without reverse translation. Real clients drop them, so a load
// that accepted them would measure a path that no client has.
var errOtherAddress = errors.New("answer from another address")

// read receives a packet. The first one determines the server's port for the rest of the
// transfer. Its address must be the requested one.
func (l *tftpLoop) read(d *download) (int, error) {
	if d.block > 0 {
		return unix.Read(d.fd, l.buf[:])
	}
	n, from, err := unix.Recvfrom(d.fd, l.buf[:], 0)
	if err != nil {
		return n, err
	}
	if !l.asked(from) {
		return n, errOtherAddress
	}
	return n, unix.Connect(d.fd, from)
}

// asked reports whether an answer's address is the requested one.
func (l *tftpLoop) asked(from unix.Sockaddr) bool {
	switch a := from.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(a.Addr) == l.cfg.Target.Addr().Unmap()
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(a.Addr) == l.cfg.Target.Addr().WithZone("")
	}
	return false
}
