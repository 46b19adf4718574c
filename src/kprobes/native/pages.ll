; Generated from pages.c by `make runtime`.
; b1cf6f3b24f7167afe59c515210c76993cde2b4f5ace7c3597d587eb2069a0d4
%struct.event = type { ptr, ptr, i64, i64 }
define dso_local i64 @pages_read(ptr %pages) #0 {
entry:
  br label %for.cond
for.cond:
  %n.0 = phi i64 [ 0, %entry ], [ %inc102, %for.inc ]
  %found.0 = phi i64 [ 0, %entry ], [ %found.1, %for.inc ]
  %count = getelementptr inbounds nuw i8, ptr %pages, i64 16
  %0 = load i64, ptr %count, align 8
  %cmp = icmp ult i64 %n.0, %0
  br i1 %cmp, label %for.body, label %return
for.body:
  %1 = load ptr, ptr %pages, align 8
  %size = getelementptr inbounds nuw i8, ptr %pages, i64 8
  %2 = load i64, ptr %size, align 8
  %mul = mul i64 %n.0, %2
  %add.ptr = getelementptr inbounds i8, ptr %1, i64 %mul
  %begin = getelementptr inbounds nuw i8, ptr %pages, i64 32
  %3 = load i64, ptr %begin, align 8
  %add.ptr1 = getelementptr inbounds i8, ptr %add.ptr, i64 %3
  %4 = load i64, ptr %add.ptr, align 1
  %commit = getelementptr inbounds nuw i8, ptr %pages, i64 24
  %5 = load i64, ptr %commit, align 8
  %add.ptr2 = getelementptr inbounds i8, ptr %add.ptr, i64 %5
  %6 = load i32, ptr %add.ptr2, align 1
  %and = and i32 %6, 1048575
  %conv = zext nneg i32 %and to i64
  %skips = getelementptr inbounds nuw i8, ptr %pages, i64 40
  %7 = load ptr, ptr %skips, align 8
  %arrayidx = getelementptr inbounds i64, ptr %7, i64 %n.0
  %8 = load i64, ptr %arrayidx, align 8
  %add.ptr4 = getelementptr inbounds i8, ptr %add.ptr1, i64 %8
  %size5 = getelementptr inbounds nuw i8, ptr %pages, i64 8
  %9 = load i64, ptr %size5, align 8
  %begin6 = getelementptr inbounds nuw i8, ptr %pages, i64 32
  %10 = load i64, ptr %begin6, align 8
  %sub = sub i64 %9, %10
  %cmp7 = icmp uge i64 %sub, %conv
  %rem = and i64 %conv, 3
  %tobool.not = icmp eq i64 %rem, 0
  %or.cond = and i1 %cmp7, %tobool.not
  br i1 %or.cond, label %if.end, label %return
if.end:
  %add.ptr9 = getelementptr inbounds nuw i8, ptr %add.ptr1, i64 %conv
  br label %for.cond10
for.cond10:
  %time.0 = phi i64 [ %4, %if.end ], [ %cond, %cond.end ], [ %add34, %if.end100 ]
  %at.0 = phi ptr [ %add.ptr1, %if.end ], [ %add.ptr32, %cond.end ], [ %add.ptr101, %if.end100 ]
  %found.1 = phi i64 [ %found.0, %if.end ], [ %found.1, %cond.end ], [ %found.2, %if.end100 ]
  %cmp11 = icmp ult ptr %at.0, %add.ptr9
  br i1 %cmp11, label %for.body13, label %for.inc
for.body13:
  %11 = load i32, ptr %at.0, align 1
  %and15 = and i32 %11, 31
  %shr = lshr i32 %11, 5
  %conv16 = zext nneg i32 %shr to i64
  %sub.ptr.lhs.cast = ptrtoint ptr %add.ptr9 to i64
  %sub.ptr.rhs.cast = ptrtoint ptr %at.0 to i64
  %sub.ptr.sub = sub i64 %sub.ptr.lhs.cast, %sub.ptr.rhs.cast
  %add.ptr19 = getelementptr inbounds nuw i8, ptr %at.0, i64 4
  %cmp20 = icmp samesign ugt i32 %and15, 29
  br i1 %cmp20, label %if.then22, label %if.end33
if.then22:
  %cmp23 = icmp ult i64 %sub.ptr.sub, 8
  br i1 %cmp23, label %return, label %if.end26
if.end26:
  %12 = load i32, ptr %add.ptr19, align 1
  %conv28 = zext i32 %12 to i64
  %shl = shl nuw nsw i64 %conv28, 27
  %add = or disjoint i64 %shl, %conv16
  %cmp29 = icmp eq i32 %and15, 31
  br i1 %cmp29, label %cond.true, label %cond.false
cond.true:
  %and1.i = and i64 %4, -576460752303423488
  %or.i = or disjoint i64 %add, %and1.i
  %tobool.i.not = icmp ult i64 %4, 576460752303423488
  %cmp.i = icmp ult i64 %or.i, %4
  %13 = select i1 %cmp.i, i64 576460752303423488, i64 0
  %cond.i = select i1 %tobool.i.not, i64 0, i64 %13
  %add.i = add i64 %or.i, %cond.i
  br label %cond.end
cond.false:
  %add31 = add i64 %time.0, %add
  br label %cond.end
cond.end:
  %cond = phi i64 [ %add.i, %cond.true ], [ %add31, %cond.false ]
  %add.ptr32 = getelementptr inbounds nuw i8, ptr %at.0, i64 8
  br label %for.cond10
if.end33:
  %add34 = add i64 %time.0, %conv16
  %cmp35 = icmp eq i32 %11, 29
  br i1 %cmp35, label %for.inc, label %if.end38
if.end38:
  %mul39 = shl nuw nsw i32 %and15, 2
  %conv40 = zext nneg i32 %mul39 to i64
  switch i32 %and15, label %if.end62 [
    i32 29, label %if.then46
    i32 0, label %if.then46
  ]
if.then46:
  %cmp47 = icmp ult i64 %sub.ptr.sub, 8
  br i1 %cmp47, label %cond.end52, label %cond.false50
cond.false50:
  %14 = load i32, ptr %add.ptr19, align 1
  br label %cond.end52
cond.end52:
  %cond53 = phi i32 [ %14, %cond.false50 ], [ 0, %if.then46 ]
  %conv54 = zext i32 %cond53 to i64
  %cmp55 = icmp uge i32 %cond53, 4
  %rem58 = and i64 %conv54, 3
  %tobool59.not = icmp eq i64 %rem58, 0
  %or.cond67 = and i1 %cmp55, %tobool59.not
  br i1 %or.cond67, label %if.end62, label %return
if.end62:
  %size17.0 = phi i64 [ %conv40, %if.end38 ], [ %conv54, %cond.end52 ]
  %sub63 = add i64 %sub.ptr.sub, -4
  %cmp64 = icmp ugt i64 %size17.0, %sub63
  br i1 %cmp64, label %return, label %if.end67
if.end67:
  %cmp68.not = icmp eq i32 %and15, 29
  %cmp70.not = icmp ult ptr %at.0, %add.ptr4
  %or.cond68 = select i1 %cmp68.not, i1 true, i1 %cmp70.not
  br i1 %or.cond68, label %if.end100, label %if.then72
if.then72:
  %cmp73 = icmp eq i32 %and15, 0
  %cond75 = select i1 %cmp73, i32 4, i32 0
  %conv76 = zext nneg i32 %cond75 to i64
  %add.ptr77 = getelementptr inbounds nuw i8, ptr %add.ptr19, i64 %conv76
  %15 = load ptr, ptr %pages, align 8
  %sub.ptr.lhs.cast79 = ptrtoint ptr %add.ptr77 to i64
  %sub.ptr.rhs.cast80 = ptrtoint ptr %15 to i64
  %sub.ptr.sub81 = sub i64 %sub.ptr.lhs.cast79, %sub.ptr.rhs.cast80
  %at82 = getelementptr inbounds nuw i8, ptr %pages, i64 48
  %16 = load ptr, ptr %at82, align 8
  %arrayidx83 = getelementptr inbounds i64, ptr %16, i64 %found.1
  store i64 %sub.ptr.sub81, ptr %arrayidx83, align 8
  %sub84 = sub nsw i64 %size17.0, %conv76
  %sizes = getelementptr inbounds nuw i8, ptr %pages, i64 56
  %17 = load ptr, ptr %sizes, align 8
  %arrayidx85 = getelementptr inbounds i64, ptr %17, i64 %found.1
  store i64 %sub84, ptr %arrayidx85, align 8
  %ts = getelementptr inbounds nuw i8, ptr %pages, i64 64
  %18 = load ptr, ptr %ts, align 8
  %arrayidx86 = getelementptr inbounds i64, ptr %18, i64 %found.1
  store i64 %add34, ptr %arrayidx86, align 8
  %page87 = getelementptr inbounds nuw i8, ptr %pages, i64 72
  %19 = load ptr, ptr %page87, align 8
  %arrayidx88 = getelementptr inbounds i64, ptr %19, i64 %found.1
  store i64 %n.0, ptr %arrayidx88, align 8
  %cmp89 = icmp samesign ugt i64 %size17.0, %conv76
  br i1 %cmp89, label %cond.true91, label %cond.end96
cond.true91:
  %add.ptr92 = getelementptr inbounds nuw i8, ptr %add.ptr19, i64 %conv76
  %20 = load i16, ptr %add.ptr92, align 1
  br label %cond.end96
cond.end96:
  %cond97.off0 = phi i16 [ %20, %cond.true91 ], [ 0, %if.then72 ]
  %numbers = getelementptr inbounds nuw i8, ptr %pages, i64 80
  %21 = load ptr, ptr %numbers, align 8
  %inc = add nsw i64 %found.1, 1
  %arrayidx99 = getelementptr inbounds i16, ptr %21, i64 %found.1
  store i16 %cond97.off0, ptr %arrayidx99, align 2
  br label %if.end100
if.end100:
  %found.2 = phi i64 [ %inc, %cond.end96 ], [ %found.1, %if.end67 ]
  %add.ptr101 = getelementptr inbounds nuw i8, ptr %add.ptr19, i64 %size17.0
  br label %for.cond10
for.inc:
  %inc102 = add i64 %n.0, 1
  br label %for.cond
return:
  %retval.0 = phi i64 [ -1, %if.end62 ], [ -1, %for.body ], [ -1, %if.then22 ], [ -1, %cond.end52 ], [ %found.0, %for.cond ]
  ret i64 %retval.0
}
define dso_local i64 @pages_copy(ptr %data, ptr %at, ptr %sizes, ptr %numbers, i64 %count, ptr %events, ptr %all) #0 {
entry:
  br label %for.cond
for.cond:
  %n.0 = phi i64 [ 0, %entry ], [ %inc36, %for.inc35 ]
  %cmp = icmp ult i64 %n.0, %count
  br i1 %cmp, label %for.body, label %for.end37
for.body:
  %arrayidx = getelementptr inbounds i16, ptr %numbers, i64 %n.0
  %0 = load i16, ptr %arrayidx, align 2
  %idxprom = zext i16 %0 to i64
  %arrayidx1 = getelementptr inbounds nuw i16, ptr %events, i64 %idxprom
  %1 = load i16, ptr %arrayidx1, align 2
  %idx.ext = zext i16 %1 to i64
  %add.ptr = getelementptr inbounds nuw %struct.event, ptr %all, i64 %idx.ext
  %arrayidx2 = getelementptr inbounds i64, ptr %at, i64 %n.0
  %2 = load i64, ptr %arrayidx2, align 8
  %add.ptr3 = getelementptr inbounds i8, ptr %data, i64 %2
  %index = getelementptr inbounds nuw i8, ptr %add.ptr, i64 8
  %3 = load ptr, ptr %index, align 8
  %incdec.ptr = getelementptr inbounds nuw i8, ptr %3, i64 8
  store ptr %incdec.ptr, ptr %index, align 8
  store i64 %n.0, ptr %3, align 8
  %arrayidx4 = getelementptr inbounds i64, ptr %sizes, i64 %n.0
  %4 = load i64, ptr %arrayidx4, align 8
  %least = getelementptr inbounds nuw i8, ptr %add.ptr, i64 24
  %5 = load i64, ptr %least, align 8
  %cmp5 = icmp ult i64 %4, %5
  br i1 %cmp5, label %if.then, label %if.end
if.then:
  %arrayidx7 = getelementptr inbounds i64, ptr %sizes, i64 %n.0
  %6 = load i64, ptr %arrayidx7, align 8
  %least8 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 24
  store i64 %6, ptr %least8, align 8
  br label %if.end
if.end:
  %least9 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 24
  %7 = load i64, ptr %least9, align 8
  %size = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %8 = load i64, ptr %size, align 8
  %cmp10 = icmp ult i64 %7, %8
  br i1 %cmp10, label %for.inc35, label %for.cond14
for.cond14:
  %done.0 = phi i64 [ %add, %for.body18 ], [ 0, %if.end ]
  %size15 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %9 = load i64, ptr %size15, align 8
  %sub = sub i64 %9, %done.0
  %cmp16 = icmp ugt i64 %sub, 7
  br i1 %cmp16, label %for.body18, label %for.cond22
for.body18:
  %add.ptr19 = getelementptr inbounds i8, ptr %add.ptr3, i64 %done.0
  %10 = load i64, ptr %add.ptr19, align 1
  %11 = load ptr, ptr %add.ptr, align 8
  %add.ptr20 = getelementptr inbounds i8, ptr %11, i64 %done.0
  store i64 %10, ptr %add.ptr20, align 1
  %add = add i64 %done.0, 8
  br label %for.cond14
for.cond22:
  %done.1 = phi i64 [ %inc, %for.body26 ], [ %done.0, %for.cond14 ]
  %size23 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %12 = load i64, ptr %size23, align 8
  %cmp24 = icmp ult i64 %done.1, %12
  br i1 %cmp24, label %for.body26, label %for.end31
for.body26:
  %arrayidx27 = getelementptr inbounds i8, ptr %add.ptr3, i64 %done.1
  %13 = load i8, ptr %arrayidx27, align 1
  %14 = load ptr, ptr %add.ptr, align 8
  %arrayidx29 = getelementptr inbounds i8, ptr %14, i64 %done.1
  store i8 %13, ptr %arrayidx29, align 1
  %inc = add i64 %done.1, 1
  br label %for.cond22
for.end31:
  %size32 = getelementptr inbounds nuw i8, ptr %add.ptr, i64 16
  %15 = load i64, ptr %size32, align 8
  %16 = load ptr, ptr %add.ptr, align 8
  %add.ptr34 = getelementptr inbounds i8, ptr %16, i64 %15
  store ptr %add.ptr34, ptr %add.ptr, align 8
  br label %for.inc35
for.inc35:
  %inc36 = add i64 %n.0, 1
  br label %for.cond
for.end37:
  ret i64 %count
}
define dso_local i64 @pages_places(ptr %batch, i64 %count, ptr %next, ptr %places) #0 {
entry:
  br label %for.cond
for.cond:
  %n.0 = phi i64 [ 0, %entry ], [ %inc3, %for.body ]
  %cmp = icmp ult i64 %n.0, %count
  br i1 %cmp, label %for.body, label %for.end
for.body:
  %arrayidx = getelementptr inbounds i16, ptr %batch, i64 %n.0
  %0 = load i16, ptr %arrayidx, align 2
  %idxprom = zext i16 %0 to i64
  %arrayidx1 = getelementptr inbounds nuw i32, ptr %next, i64 %idxprom
  %1 = load i32, ptr %arrayidx1, align 4
  %inc = add i32 %1, 1
  store i32 %inc, ptr %arrayidx1, align 4
  %arrayidx2 = getelementptr inbounds i32, ptr %places, i64 %n.0
  store i32 %1, ptr %arrayidx2, align 4
  %inc3 = add i64 %n.0, 1
  br label %for.cond
for.end:
  ret i64 %count
}
