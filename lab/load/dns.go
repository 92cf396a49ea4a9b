package load

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// defaultName is the default name of a DNS query.
const defaultName = "example.test"

// The ids of the two queries, and the bits for their answers.
const (
	idA, idAAAA = 1, 2
	dnsBoth     = 1<<idA | 1<<idAAAA
)

// dnsQuestions returns the questions for a name's A and AAAA record.
func dnsQuestions(name string) (questions [2][]byte, err error) {
	if name == "" {
		name = defaultName
	}
	fqdn, err := dnsmessage.NewName(name + ".")
	if err != nil {
		return questions, fmt.Errorf("name %q: %w", name, err)
	}
	for i, typ := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
		m := dnsmessage.Message{
			Header:    dnsmessage.Header{ID: uint16(idA + i), RecursionDesired: true},
			Questions: []dnsmessage.Question{{Name: fqdn, Type: typ, Class: dnsmessage.ClassINET}},
		}
		if questions[i], err = m.Pack(); err != nil {
			return questions, fmt.Errorf("name %q: %w", name, err)
		}
	}
	return questions, nil
}

// dnsAnswer returns the bit of the question that a datagram answers, 0 if it is
// no answer without error to either.
func dnsAnswer(datagram []byte) uint8 {
	const response, rcode = 0x80, 0x0f
	if len(datagram) < 12 || datagram[2]&response == 0 || datagram[3]&rcode != 0 {
		return 0
	}
	switch id := binary.BigEndian.Uint16(datagram); id {
	case idA, idAAAA:
		return 1 << id
	}
	return 0
}

// buddy is a second thread that sends the AAAA query at the moment when the loop sends
// the A query. Both wait for the other, so that the time to wake a thread delays neither.
type buddy struct {
	question    []byte
	bell        int          // an eventfd: the runtime took milliseconds to wake a thread
	fd          atomic.Int64 // of the thread whose question the buddy sends and removes
	ready, goes atomic.Bool
	ended       sync.WaitGroup
}

// buddyPatience limits how long one thread waits for the other.
const buddyPatience = time.Millisecond

// Used instead of a socket: there is none, or the buddy ends.
const (
	noSocket  = -1
	buddyEnds = -2
)

func newBuddy(cfg Config) (*buddy, error) {
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make eventfd: %w", err)
	}
	questions, _ := dnsQuestions(cfg.Payload) // Validate has checked it
	b := &buddy{bell: bell, question: questions[1]}
	b.ended.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var rings [8]byte
		for {
			if _, err := unix.Read(bell, rings[:]); err != nil {
				continue // interrupted by a signal
			}
			fd := b.fd.Swap(noSocket)
			if fd == buddyEnds {
				return
			}
			if fd == noSocket {
				continue // it took too long
			}
			b.ready.Store(true)
			spin(&b.goes)
			_, _ = unix.Write(int(fd), b.question) // a question that is not sent is not answered
		}
	})
	return b, nil
}

// send has the buddy send now; the caller sends the other question at once.
func (b *buddy) send(fd int) {
	b.ready.Store(false)
	b.goes.Store(false)
	b.ring(int64(fd))
	spin(&b.ready)
	if b.fd.CompareAndSwap(int64(fd), noSocket) {
		_, _ = unix.Write(fd, b.question) // the buddy is late: send one after the other
	}
	b.goes.Store(true)
}

func (b *buddy) ring(fd int64) {
	b.fd.Store(fd)
	_, _ = unix.Write(b.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // a counter that is read again and again is never full
}

func (b *buddy) end() {
	if b != nil {
		b.ring(buddyEnds)
		b.goes.Store(true)
		b.ended.Wait()
		unix.Close(b.bell)
	}
}

// spin waits for a flag, and yields the CPU to other threads: there may be more
// threads than CPUs.
func spin(flag *atomic.Bool) {
	for limit := time.Now().Add(buddyPatience); !flag.Load(); {
		if time.Now().After(limit) {
			return
		}
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}
