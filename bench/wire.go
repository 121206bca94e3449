package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// wire is an HTTP/2 connection on which open loops ask for decisions. It does no more
// than they need, in two goroutines: one that sends, and one of its own that reads.
// When decisions come one by one, a call by grpc-go costs the generator as much CPU
// as it costs the server, and their waits would be those for a CPU.
type wire struct {
	conn  net.Conn
	ended func(n int, answer []byte) error // of decision n; answer is valid until it returns
	ready chan struct{}                    // closed when the server has told its settings

	mu      sync.Mutex
	out     bytes.Buffer // what flush sends
	frames  *http2.Framer
	headers []byte           // of every request but the first
	streams map[uint32]*call // that are under way, by their ids
	most    int              // of them at once
	next    uint32           // id of a stream
}

// call is a decision that is under way.
type call struct {
	n      int
	answer []byte // of gRPC: five bytes before the message
}

const (
	// The most calls that are under way on a connection. Their requests, and those
	// that the server has read and not told so yet, fit in HTTP/2's first window for
	// data, 64 KiB, so that wire never waits for a larger one.
	wireCalls  = 128
	maxRequest = 128       // bytes
	maxWindow  = 1<<31 - 1 // bytes of answers that the server may send
)

// dialWire connects. It calls ended for each decision, in a goroutine of its own; an
// error ends the connection. Nothing takes longer than until.
func dialWire(address string, until time.Time, ended func(n int, answer []byte) error) (*wire, error) {
	conn, err := net.DialTimeout("tcp", address, drainTime)
	if err != nil {
		return nil, err
	}
	w := &wire{conn: conn, ended: ended, ready: make(chan struct{}), streams: map[uint32]*call{}, most: wireCalls, next: 1}
	w.frames = http2.NewFramer(&w.out, nil)
	w.out.WriteString(http2.ClientPreface)
	err = errors.Join(
		conn.SetDeadline(until),
		w.frames.WriteSettings(http2.Setting{ID: http2.SettingEnablePush, Val: 0}),
		w.frames.WriteWindowUpdate(0, maxWindow-65_535),
		w.flush(),
	)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return w, nil
}

// block is the header block of a request.
func block(encoder *hpack.Encoder, into *bytes.Buffer, authority string) ([]byte, error) {
	into.Reset()
	for _, f := range [][2]string{
		{":method", "POST"},
		{":scheme", "http"},
		{":path", rls.RateLimitService_ShouldRateLimit_FullMethodName},
		{":authority", authority},
		{"content-type", "application/grpc"},
		{"user-agent", "weir-bench"},
		{"te", "trailers"},
		{"grpc-timeout", fmt.Sprintf("%dm", toldTimeout.Milliseconds())},
	} {
		if err := encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
			return nil, err
		}
	}
	return bytes.Clone(into.Bytes()), nil
}

// ask puts decision n in line for flush. It returns false if too many are under way.
func (w *wire) ask(n int, request []byte) (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.streams) >= w.most {
		return false, nil
	}
	headers := w.headers
	if headers == nil { // the server has no table of header fields yet: this request fills it
		var buffer bytes.Buffer
		encoder := hpack.NewEncoder(&buffer)
		first, err := block(encoder, &buffer, w.conn.RemoteAddr().String())
		if err != nil {
			return false, err
		}
		if w.headers, err = block(encoder, &buffer, w.conn.RemoteAddr().String()); err != nil {
			return false, err
		}
		headers = first
	}
	id := w.next
	w.next += 2
	w.streams[id] = &call{n: n}
	message := make([]byte, 5, 5+len(request)) // not compressed, and its length
	binary.BigEndian.PutUint32(message[1:], uint32(len(request)))
	return true, errors.Join(
		w.frames.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: headers, EndHeaders: true}),
		w.frames.WriteData(id, true, append(message, request...)),
	)
}

// flush sends what is in line.
func (w *wire) flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.out.Len() == 0 {
		return nil
	}
	_, err := w.conn.Write(w.out.Bytes())
	w.out.Reset()
	return err
}

// read reads answers until the connection ends, and returns why it did.
func (w *wire) read() error {
	frames := http2.NewFramer(nil, bufio.NewReaderSize(w.conn, 64<<10))
	frames.SetReuseFrames()
	var got uint32 // bytes since maxWindow was granted
	var status, message string
	decoder := hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		switch f.Name {
		case "grpc-status":
			status = f.Value
		case "grpc-message":
			message = f.Value
		}
	})
	for {
		frame, err := frames.ReadFrame()
		if err != nil {
			return err
		}
		switch f := frame.(type) {
		case *http2.DataFrame:
			w.mu.Lock()
			if c := w.streams[f.StreamID]; c != nil {
				c.answer = append(c.answer, f.Data()...)
			}
			if got += f.Length; got > maxWindow/2 {
				err, got = w.frames.WriteWindowUpdate(0, got), 0
			}
			w.mu.Unlock()
			if err != nil {
				return err
			}
		case *http2.HeadersFrame:
			if !f.HeadersEnded() {
				return errors.New("headers of an answer are longer than a frame")
			}
			status, message = "", ""
			if _, err := decoder.Write(f.HeaderBlockFragment()); err != nil {
				return err
			}
			if !f.StreamEnded() {
				continue
			}
			if status != "0" {
				return fmt.Errorf("the answer has gRPC status %s: %s", status, message)
			}
			if err := w.end(f.StreamID); err != nil {
				return err
			}
		case *http2.SettingsFrame:
			if err := w.settings(f); err != nil {
				return err
			}
		case *http2.PingFrame:
			if f.IsAck() {
				continue
			}
			w.mu.Lock()
			err := w.frames.WritePing(true, f.Data)
			w.mu.Unlock()
			if err := errors.Join(err, w.flush()); err != nil {
				return err
			}
		case *http2.RSTStreamFrame:
			return fmt.Errorf("the server has reset a call: %v", f.ErrCode)
		case *http2.GoAwayFrame:
			return fmt.Errorf("the server goes away: %v", f.ErrCode)
		}
	}
}

// end is the end of a call that was answered.
func (w *wire) end(id uint32) error {
	w.mu.Lock()
	c := w.streams[id]
	delete(w.streams, id)
	w.mu.Unlock()
	if c == nil || len(c.answer) < 5 {
		return errors.New("an answer without a message")
	}
	return w.ended(c.n, c.answer[5:])
}

// settings heeds those of the server, and says so.
func (w *wire) settings(f *http2.SettingsFrame) error {
	if f.IsAck() {
		return nil
	}
	w.mu.Lock()
	if most, ok := f.Value(http2.SettingMaxConcurrentStreams); ok {
		w.most = int(min(most, wireCalls))
	}
	err := w.frames.WriteSettingsAck()
	w.mu.Unlock()
	select {
	case <-w.ready:
	default:
		close(w.ready)
	}
	return errors.Join(err, w.flush())
}
