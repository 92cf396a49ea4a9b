package kernel

import (
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// xfrm runs commands of "ip xfrm" in the test's network namespace.
func xfrm(t *testing.T, commands ...string) {
	t.Helper()
	cmd := exec.Command("ip", "-batch", "-")
	cmd.Stdin = strings.NewReader("xfrm " + strings.Join(commands, "\nxfrm ") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%q: %v: %s", commands, err, out)
	}
}

func policy(dir XfrmDir, src, dst string) XfrmPolicy {
	return XfrmPolicy{Dir: dir, Src: netip.MustParsePrefix(src), Dst: netip.MustParsePrefix(dst)}
}

// policyLists returns the reports of a watch.
type policyLists chan []XfrmPolicy

func (l policyLists) want(t *testing.T, when string, want ...XfrmPolicy) {
	t.Helper()
	var got []XfrmPolicy
	slices.SortFunc(want, XfrmPolicy.compare)
	for deadline := time.After(time.Minute); ; {
		select {
		case got = <-l:
		case <-deadline:
			t.Fatalf("%s: %v, want %v", when, got, want)
		}
		if slices.Equal(got, want) {
			return
		}
	}
}

const esp = " tmpl src 192.0.2.1 dst 192.0.2.2 proto esp mode tunnel"

func TestWatchXfrm(t *testing.T) {
	netnstest.Enter(t)
	xfrm(t, "policy add src 10.1.0.0/16 dst 10.2.0.0/16 dir out"+esp)
	lists := make(policyLists, 100)
	w, err := WatchXfrm(func(p []XfrmPolicy) { lists <- p }, func(err error) { t.Error(err) })
	must.Do(t, err)
	first := policy(XfrmOut, "10.1.0.0/16", "10.2.0.0/16")
	lists.want(t, "from before", first)
	xfrm(t, "policy add src 10.2.0.0/16 dst 10.1.0.0/16 dir in"+esp, "policy add src 10.2.0.0/16 dst 10.1.0.0/16 dir fwd"+esp)
	in, forward := policy(XfrmIn, "10.2.0.0/16", "10.1.0.0/16"), policy(XfrmForward, "10.2.0.0/16", "10.1.0.0/16")
	lists.want(t, "both ways", first, in, forward)
	xfrm(t, "policy add src ::/0 dst fd00::/8 dir out action block", "policy add src 0.0.0.0/0 dst 198.51.100.0/24 dir out action block")
	six, four := policy(XfrmOut, "::/0", "fd00::/8"), policy(XfrmOut, "0.0.0.0/0", "198.51.100.0/24")
	lists.want(t, "blocked", first, in, forward, six, four)
	// Policies that concern no device: those that let packets pass unchanged, and those
	// of an xfrm interface.
	xfrm(t, "policy add src 10.3.0.0/16 dst 10.4.0.0/16 dir out action allow",
		"policy add src 10.5.0.0/16 dst 10.6.0.0/16 dir out if_id 7"+esp,
		"policy add src 10.1.0.0/16 dst 10.2.0.0/16 proto tcp dir out priority 5"+esp, // the same selection
		"policy delete src 10.2.0.0/16 dst 10.1.0.0/16 dir fwd")
	lists.want(t, "one less", first, in, six, four)
	xfrm(t, "policy flush")
	lists.want(t, "flushed")
	xfrm(t, "policy setdefault fwd block")
	lists.want(t, "blocked by default", policy(XfrmForward, "0.0.0.0/0", "0.0.0.0/0"), policy(XfrmForward, "::/0", "::/0"))
	xfrm(t, "policy setdefault fwd accept")
	lists.want(t, "accepted by default")
	for range 2 {
		must.Do(t, w.Close())
	}
	xfrm(t, "policy add src 10.1.0.0/16 dst 10.2.0.0/16 dir out"+esp)
	select {
	case p := <-lists:
		t.Errorf("after Close: %v", p)
	case <-time.After(3 * xfrmPause):
	}
}

// receiving is a goroutine that waits for a message, in a dump of all.
var receiving = regexp.MustCompile(`\[(IO wait|syscall)[^]]*\]:\n(\S[^\n]*\n\t[^\n]*\n)*[^\n]*\.Receive\(`)

func TestReceiveEndsWithClose(t *testing.T) {
	netnstest.Enter(t)
	sub, err := Subscribe(false, unix.RTNLGRP_LINK)
	must.Do(t, err)
	done := make(chan error)
	go func() { _, err := sub.Receive(); done <- err }()
	await.True(t, "Receive waits", func() bool {
		stacks := make([]byte, 1<<20)
		return receiving.Match(stacks[:runtime.Stack(stacks, true)])
	})
	must.Do(t, sub.Close())
	if err := <-done; !errors.Is(err, os.ErrClosed) {
		t.Errorf("waiting: %v", err)
	}
	if _, err := sub.Receive(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// More notifications than the socket holds: the watch reads the policies again.
func TestWatchXfrmLosesNews(t *testing.T) {
	netnstest.Enter(t)
	sub, err := subscribe(unix.NETLINK_XFRM, "xfrm", false, nl.XFRMNLGRP_POLICY)
	must.Do(t, err)
	raw, err := sub.file.SyscallConn()
	must.Do(t, err)
	must.Do(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4096) }))
	must.Do(t, err)
	var commands []string
	for i := range 200 {
		commands = append(commands, "policy add src 10.1.0.0/16 dst 10.2."+strconv.Itoa(i)+".0/24 dir out action block")
	}
	xfrm(t, commands...)
	xfrm(t, "policy flush")
	// The first that the watch hears is that news were lost.
	lists := make(policyLists, 100)
	w, err := followXfrm(sub, func(p []XfrmPolicy) { lists <- p }, func(err error) { t.Error(err) })
	must.Do(t, err)
	defer w.Close()
	lists.want(t, "at first")
	xfrm(t, commands...)
	xfrm(t, "policy flush", "policy add src 10.1.0.0/16 dst 10.3.0.0/16 dir out action block")
	lists.want(t, "in the end", policy(XfrmOut, "10.1.0.0/16", "10.3.0.0/16"))
}

func TestParseXfrm(t *testing.T) {
	if _, _, err := parseXfrm(make([]byte, 10)); err == nil {
		t.Error("a policy that is cut off")
	}
	msg := make([]byte, nl.SizeofXfrmUserpolicyInfo)
	msg[40], msg[42] = unix.AF_INET, 33
	if _, _, err := parseXfrm(msg); err == nil {
		t.Error("a prefix of 33 bits")
	}
	msg[42] = 32
	if _, applies, err := parseXfrm(msg); err != nil || applies {
		t.Errorf("allowed unchanged: applies %v, %v", applies, err)
	}
}
