package connectivity

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"spillway.dev/spillway/internal/diagnosis/connectivity/echo"
)

// Times of a client. Variables, so that tests need not wait.
var (
	// tryTimeout is the time for one question, and the silence that counts as dropped.
	tryTimeout = 2 * time.Second
	// settleTimeout is the time, from the client's start, until the first correct answer: the
	// agent of a node may not have written a new Service yet. Each question is asked
	// leastTries times in any case.
	settleTimeout = 15 * time.Second
	// patientTimeout is that of patient questions.
	patientTimeout = time.Minute
	settlePause    = 250 * time.Millisecond
)

// Limits of a client's questions.
const (
	parallel    = 8
	leastTries  = 2
	answerTries = 5
	stickyTries = 10
	refuseTries = 3
	// spreadTries is enough for ten servers that are chosen at random: one of them is missed
	// in 1 of 3,000 runs.
	spreadTries = 120
)

// RunClient carries out a plan and writes a Result for each Ask, as JSON lines. Failures of
// questions are results; an error is one of the client itself.
func RunClient(ctx context.Context, plan Plan, out io.Writer) error {
	if plan.Serve != "" {
		if err := Serve(plan.Serve); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	lines := json.NewEncoder(out)
	var group errgroup.Group
	group.SetLimit(parallel)
	start := time.Now()
	for i, ask := range plan.Asks {
		group.Go(func() error {
			got := ask.run(ctx, start)
			mu.Lock()
			defer mu.Unlock()
			return lines.Encode(Result{Ask: i, Got: got})
		})
	}
	return group.Wait()
}

// Serve answers on Port with a name, in the background.
func Serve(name string) error {
	return echo.Serve(name, fmt.Sprintf("tcp :%d", Port), fmt.Sprintf("udp :%d", Port))
}

// run asks until the first try is as expected, then a series that must be so without an
// exception. It returns the difference, "" if there is none.
func (a Ask) run(ctx context.Context, start time.Time) string {
	deadline := start.Add(settleTimeout)
	if a.Patient {
		deadline = start.Add(patientTimeout)
	}
	for tries := 1; ; tries++ {
		got := a.once(ctx)
		difference := a.compare(got)
		if difference == "" {
			return a.series(ctx, got)
		}
		if tries >= leastTries && time.Now().After(deadline) || ctx.Err() != nil {
			return difference
		}
		select {
		case <-ctx.Done():
		case <-time.After(settlePause):
		}
	}
}

// outcome is what became of one question: the name of the server, or the kind of failure.
type outcome struct {
	server string
	kind   Expect // Answer, Refused or Dropped; "" for all others
	detail string // of a failure
}

func (o outcome) String() string {
	switch {
	case o.kind == Answer:
		return "answer of " + o.server
	case o.kind == Dropped:
		return "no answer"
	}
	return o.detail
}

// compare returns the difference of one outcome from the expectation.
func (a Ask) compare(o outcome) string {
	if a.Expect == Refused || a.Expect == Dropped {
		if o.kind == a.Expect {
			return ""
		}
		return o.String()
	}
	if o.kind == Answer && slices.Contains(a.Servers, o.server) {
		return ""
	}
	return o.String()
}

// series repeats a question after a first correct outcome.
func (a Ask) series(ctx context.Context, first outcome) string {
	tries := map[Expect]int{Answer: answerTries, Spread: spreadTries, Sticky: stickyTries, Refused: refuseTries}[a.Expect]
	seen := map[string]bool{first.server: true}
	for i := 1; i < tries; i++ {
		if a.Expect == Spread && len(seen) == len(a.Servers) && i >= answerTries {
			return ""
		}
		got := a.once(ctx)
		if difference := a.compare(got); difference != "" {
			return fmt.Sprintf("%s, after %d correct", difference, i)
		}
		seen[got.server] = true
		if a.Expect == Sticky && len(seen) > 1 {
			return fmt.Sprintf("answers of %s and %s", first.server, got.server)
		}
	}
	if a.Expect == Spread && len(seen) < len(a.Servers) {
		missing := slices.DeleteFunc(slices.Clone(a.Servers), func(s string) bool { return seen[s] })
		return fmt.Sprintf("no answer of %s in %d tries", strings.Join(missing, ", "), tries)
	}
	return ""
}

// once asks once, over a new socket.
func (a Ask) once(ctx context.Context) outcome {
	ctx, stop := context.WithTimeout(ctx, tryTimeout)
	defer stop()
	reply, err := a.exchange(ctx)
	var timeout interface{ Timeout() bool }
	switch {
	case err == nil:
		return outcome{server: reply.Server, kind: Answer}
	case errors.Is(err, syscall.ECONNREFUSED):
		return outcome{kind: Refused, detail: "refused"}
	case errors.Is(err, syscall.EPERM) && a.Proto == "udp" && (a.Expect == Refused || a.Expect == Dropped):
		// netfilter's verdict on a datagram of the node's own process. It hides whether it is
		// a refusal or a drop.
		return outcome{kind: a.Expect, detail: "not permitted"}
	case errors.As(err, &timeout) && timeout.Timeout():
		return outcome{kind: Dropped, detail: "no answer"}
	}
	var call syscall.Errno
	if errors.As(err, &call) {
		return outcome{detail: call.Error()}
	}
	return outcome{detail: err.Error()}
}

// exchange sends a question and reads the answer.
func (a Ask) exchange(ctx context.Context) (echo.Reply, error) {
	var none echo.Reply
	if a.Unconnected {
		return a.unconnected(ctx)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, a.Proto, a.To.String())
	if err != nil {
		return none, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	question, sent := a.question(conn.LocalAddr())
	if _, err := conn.Write([]byte(sent)); err != nil {
		return none, err
	}
	line, err := bufio.NewReaderSize(conn, 1<<16).ReadBytes('\n')
	if err != nil {
		return none, err
	}
	return parseReply(line, question)
}

// unconnected asks through a UDP socket that sends to and receives from any address.
func (a Ask) unconnected(ctx context.Context) (echo.Reply, error) {
	var none echo.Reply
	conn, err := net.ListenUDP("udp", nil)
	if err != nil {
		return none, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(deadline)
	}
	question, sent := a.question(conn.LocalAddr())
	if _, err := conn.WriteToUDPAddrPort([]byte(sent), a.To); err != nil {
		return none, err
	}
	buf := make([]byte, 1<<16)
	n, from, err := conn.ReadFromUDPAddrPort(buf)
	if err != nil {
		return none, err
	}
	if from := netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != a.To {
		return none, fmt.Errorf("the answer came from %s", from)
	}
	return parseReply(buf[:n], question)
}

func parseReply(line []byte, question string) (echo.Reply, error) {
	var reply echo.Reply
	if err := json.Unmarshal(line, &reply); err != nil {
		return reply, errors.New("the answer is not a test server's")
	}
	if reply.Echo != question {
		return reply, errors.New("the answer is damaged")
	}
	return reply, nil
}

// replyOverhead bounds the bytes of an answer beside the text that it repeats.
const replyOverhead = 160

// question returns the text that the answer repeats, and the bytes to send. Blanks fill a
// large datagram, which the server leaves out: so the answer is no larger than the question.
func (a Ask) question(local net.Addr) (text, sent string) {
	size := a.Size
	if size == mtuSize {
		size = payloadOf(local)
	}
	text = "hello"
	if size > replyOverhead {
		text = strings.Repeat("x", size-replyOverhead)
	}
	return text, text + strings.Repeat(" ", max(0, size-len(text)-1)) + "\n"
}

// payloadOf returns the bytes of UDP in a full packet of the device that has the address;
// those of the least MTU of IPv6 if there is none.
func payloadOf(local net.Addr) int {
	const leastMTU, header4, header6 = 1280, 28, 48
	ap, err := netip.ParseAddrPort(local.String())
	if err != nil {
		return leastMTU - header6
	}
	header := header6
	if ap.Addr().Unmap().Is4() {
		header = header4
	}
	devices, _ := net.Interfaces()
	for _, d := range devices {
		addrs, _ := d.Addrs()
		for _, a := range addrs {
			if prefix, err := netip.ParsePrefix(a.String()); err == nil && prefix.Addr() == ap.Addr().Unmap().WithZone("") {
				return d.MTU - header
			}
		}
	}
	return leastMTU - header
}
