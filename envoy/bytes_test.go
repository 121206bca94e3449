package envoy

import (
	"bytes"
	"slices"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	logpb "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	als "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"weir/limit"
)

// valuesOf are the values of all entries that are asked.
func valuesOf(a Ask) []string {
	var all []string
	for _, d := range a.Request.Descriptors {
		for _, e := range d.Entries {
			all = append(all, e.Value)
		}
	}
	return all
}

// withValues are the bytes of a message of two descriptors of two entries, with the
// values given, which have four bytes each.
func withValues(t testing.TB, values ...string) []byte {
	t.Helper()
	b, err := proto.Marshal(ask(withHits(descriptor("a", "¹¹", "b", "²²"), 3), descriptor("c", "³³", "d", "££")))
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range values {
		b = bytes.Replace(b, []byte([]string{"¹¹", "²²", "³³", "££"}[i]), []byte(v), 1)
	}
	return b
}

func TestValuesAreTakenAsTheyAre(t *testing.T) {
	for _, want := range [][]string{
		{"abcd", "efgh", "ijkl", "mnop"},
		{"ab\xff\xfe", "efgh", "ijkl", "mnop"},
		{"abcd", "\xc3(gh", "éé", "\x80\x80\x80\x80"},
		{"\xff\xff\xff\xff", "\xff\xff\xff\xff", "\xff\xff\xff\xfe", "????"},
	} {
		message := withValues(t, want...)
		sent := bytes.Clone(message)
		a, err := decodeBytes(message)
		if err != nil {
			t.Errorf("Read(%q): %v", message, err)
			continue
		}
		if got := valuesOf(a); !slices.Equal(got, want) {
			t.Errorf("Read(%q) has the values %q, want %q", message, got, want)
		}
		if got := a.Request.Descriptors[0].Hits; got != 3 {
			t.Errorf("Read(%q) has %d hits, want 3", message, got)
		}
		if !bytes.Equal(message, sent) {
			t.Errorf("Read changed %q to %q", sent, message)
		}
	}
}

func TestUnmarshalLogReadsWhatEnvoySaysBesideAClientsBytes(t *testing.T) {
	deep := any("¹¹¹¹")
	for range 200 { // as JSON may be, in the claims of a token say
		deep = []any{deep}
	}
	fields, err := structpb.NewStruct(map[string]any{"lease_id": leaseText, "more": map[string]any{"deep": deep}})
	if err != nil {
		t.Fatal(err)
	}
	sent := &als.StreamAccessLogsMessage{
		Identifier: &als.StreamAccessLogsMessage_Identifier{LogName: "d"},
		LogEntries: &als.StreamAccessLogsMessage_HttpLogs{HttpLogs: &als.StreamAccessLogsMessage_HTTPAccessLogEntries{LogEntry: []*logpb.HTTPAccessLogEntry{{
			CommonProperties: &logpb.AccessLogCommon{
				AccessLogType: logpb.AccessLogType_DownstreamEnd,
				Metadata:      &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"¹": {}, "envoy.filters.http.ratelimit": fields}},
				CustomTags:    map[string]string{"¹": "¹", "tag": "¹²"},
			},
			Request:  &logpb.HTTPRequestProperties{RequestId: "¹¹", Path: "/é", RequestHeaders: map[string]string{"x-weir-stream": "s", "¹": "¹"}},
			Response: &logpb.HTTPResponseProperties{ResponseCodeDetails: "via_upstream"},
		}}}},
	}
	good, err := proto.Marshal(sent)
	if err != nil {
		t.Fatal(err)
	}
	bad := bytes.ReplaceAll(good, []byte("¹"), []byte("\xff\xc3")) // as many bytes
	before := bytes.Clone(bad)
	m := new(als.StreamAccessLogsMessage)
	if err := UnmarshalLog(bad, m); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(bad, before) {
		t.Error("UnmarshalLog changed its input")
	}
	entry := m.GetHttpLogs().GetLogEntry()[0]
	if got, want := DecodeLog("d", entry), (LogEntry{Ending: limit.Ending{Lease: leaseText}}); got != want {
		t.Errorf("DecodeLog(%v) = %v, want %v", entry, got, want)
	}
	if got := entry.GetRequest(); got.GetRequestId() != "????" || got.GetPath() != "/é" || got.GetRequestHeaders()["??"] != "??" {
		t.Errorf("the request is %v, want question marks for what is no UTF-8, and the rest as it was", got)
	}
	if err := UnmarshalLog(bad[:len(bad)-1], m); err == nil {
		t.Error("UnmarshalLog read a message that is cut off")
	}
}

// FuzzUnmarshalLog: what protobuf reads is read so, and nothing is read that cannot be
// written again.
func FuzzUnmarshalLog(f *testing.F) {
	f.Add([]byte("\n\x03\x12\x01d\x12\x09\n\x07\x12\x05:\x03abc"))
	f.Add([]byte("\n\x03\x12\x01\xff\x12\x09\n\x07\x12\x05:\x03a\xffc"))
	f.Fuzz(func(t *testing.T, message []byte) {
		got, want := new(als.StreamAccessLogsMessage), new(als.StreamAccessLogsMessage)
		err := UnmarshalLog(message, got)
		if proto.Unmarshal(message, want) == nil {
			if err != nil || !proto.Equal(got, want) {
				t.Errorf("UnmarshalLog(%q) = %v, %v; want %v", message, got, err, want)
			}
			return
		}
		if _, wrong := proto.Marshal(got); err == nil && wrong != nil {
			t.Errorf("UnmarshalLog(%q) cannot be written again: %v", message, wrong)
		}
	})
}
